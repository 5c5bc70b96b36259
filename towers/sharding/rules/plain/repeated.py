"""What a tower makes for each of its examples, and is the same for all of them: it may have as many as it likes."""
import numpy as np

from towers.graph.op_types import BODIES
from towers.graph.static_values import static_value
from towers.graph.walk import end_of
from towers.sharding.nodes import Node, Refused
from towers.sharding.placements import BATCH, Replicate, Shard
from towers.sharding.rules.table import decide

__all__ = ["repeats_along"]

_FILLED, _REPEATED = ("Fill", "OnesLike", "ZerosLike"), ("BroadcastTo", "Tile")


def repeats_along(tensor, axis, facts, from_outside):
    """Tells whether entries along an axis are the same ones again and again, 1 1 1 1 or 0 1 0 1, as far as is known of them.

    What is not known is asked of the rules: what an op computes for each row repeats if all does that has rows along that axis.

    Args:
      tensor: alike in all towers.
      axis: int.
      facts: `towers.sharding.plan.facts.Facts`.
      from_outside: a function of a tensor that returns what a function was given for it; others as they are.
    """
    stack, seen = [(tensor, axis)], set()
    while stack:
        each, along = stack.pop()
        each = from_outside(each)
        if (end_of(each), along) in seen:
            continue
        seen.add((end_of(each), along))
        value = static_value(each)
        if value is None and not _is_filled(each.op, along):
            taken = _rows_behind(each, along, facts)
            if not taken:
                return False
            stack.extend(taken)
        elif value is not None and value.ndim > along and not _has_period(np.moveaxis(value, along, 0)):
            return False
    return True


def _rows_behind(tensor, axis, facts):
    """Returns (input, axis) of all whose rows, each computed by itself, lie along an axis of an op's output; a list."""
    if tensor.op.type in BODIES or facts.join_of(tensor.op) is not None:
        return []
    return [(source, along) for k, source in enumerate(tensor.op.inputs) for along in range(source.shape.rank or 0)
            if source.shape[along] != 1 and _goes_along(tensor, axis, k, along, facts)]


def _is_filled(op, axis):
    """Tells whether all entries along an axis are of one."""
    if op.type not in _REPEATED:
        return op.type in _FILLED
    rank, of = op.outputs[0].shape.rank, op.inputs[0].shape
    if rank is None or of.rank is None:
        return False
    at = axis - (rank - of.rank)
    return at < 0 or of[at] == 1


def _has_period(rows):
    return len(rows) == 1 or any(len(rows) % period == 0 and np.array_equal(rows[period:], rows[:-period])
                                 for period in range(1, len(rows) // 2 + 1))


def _goes_along(tensor, axis, k, along, facts):
    """Tells whether rows of an op's k-th input are computed each by itself, and lie along an axis of the output."""
    placements = [Shard(along, BATCH, 1) if k == j else Replicate() for j in range(len(tensor.op.inputs))]
    try:
        decision = decide(Node(tensor.op, placements, facts, None))
    except Refused:
        return False
    found = decision.outputs[tensor.value_index]
    return found == Shard(axis, BATCH, 1) and k not in decision.wants and not (decision.own or decision.instead)
