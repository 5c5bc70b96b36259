"""Loops of the graph over the tower's examples, whose turn i takes example i: `tf.map_fn`, or `x[i]` in a `tf.while_loop`.

What such a loop is, and what its turns read and hand on; `towers.sharding.rules.loops.in_turn` decides for the ops within.
"""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import LOOPS_BACK, MERGES
from towers.graph.private import condition_of, control_flow_of, flows_around, is_loop, outer_control_flow
from towers.graph.static_values import static_value
from towers.graph.walk import end_of
from towers.sharding.nodes import Refused
from towers.sharding.placements import BATCH, Additive, Listed, RowNumbers, Shard, Turn, size_of

__all__ = ["IN_FRONT", "READS", "are_numbers", "counters_of_body", "ends_loop", "handed_back", "is_list_of_rows",
           "is_next", "is_over_rows", "is_turn", "is_within_turn", "number_of_rows", "numbers_all_rows", "row_read", "source_of",
           "takes_its_row"]

_NUMBERS = {tf.int32, tf.int64, tf.float32, tf.float64}  # that hold the number of a turn
READS = frozenset(["TensorArrayReadV3", "TensorListGetItem"])
IN_FRONT = frozenset(["ConcatV2", "ExpandDims", "Pack", "Reshape"])  # of an index: the number of its row stands first


def number_of_rows(times):
    """Returns the `Size` of so many rows for each example."""
    found = np.empty((), object)
    found[()] = Additive(times, BATCH)
    return size_of(found)


def is_list_of_rows(facts, placement):
    """Tells whether a list that is made of what has a placement has an element for each example, which loops take in turn."""
    return facts.follows_turns and type(placement) is Shard and (placement.axis, placement.rows, placement.times) == (0, BATCH, 1)


def are_numbers(facts, placement):
    """Tells whether numbers are those of the tower's examples, one after the other, as loops that are carried out take them."""
    return facts.carries_turns and isinstance(placement, RowNumbers) and placement.of == Additive(1, BATCH) and (
        placement.rows, placement.column) == (BATCH, None)


def numbers_all_rows(node, k):
    """Raises `Refused` where the elements of a list of examples are put in or taken out by others than their numbers."""
    if node.context.carries_turns and not are_numbers(node.context, node.inputs[k].placement):
        raise Refused("%r takes the elements of a list of the tower's examples by other numbers than theirs." % node.op.name)


def row_read(node, k):
    """Raises `Refused` where an element of a list of examples, the k-th input, is read by another number than the turn's."""
    placement = node.inputs[k].placement
    if isinstance(placement, Listed) and placement.by_row and not is_turn(node.context, node.inputs[1].tensor):
        raise Refused("%r takes one of a list of the tower's examples by its place." % node.op.name)


def takes_its_row(node, begin, end=None):
    """Tells whether an op takes of the examples the one of the turn, and no other.

    Args:
      node: `Node`, whose first input holds the examples.
      begin: int, the input that says which is the first one.
      end: int, the input that says where it ends, or how many there are; None where it takes one.
    """
    if not is_list_of_rows(node.context, node.inputs[0].placement) or not is_turn(node.context, node.inputs[begin].tensor):
        return False
    if node.type == "StridedSlice":
        if any(node.attr(name + "_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis")):
            return False
        step = static_value(node.inputs[3].tensor)
        is_one = bool(node.attr("shrink_axis_mask") & 1) or is_next(
            source_of(node.inputs[end].tensor).op, source_of(node.inputs[begin].tensor))
        return is_one and step is not None and step[0] == 1
    count = None if end is None else static_value(node.inputs[end].tensor)
    if end is None:  # by one number; TensorFlow adds nothing up for rows that no turn of a loop took
        return node.inputs[begin].dims in ([], [1]) and not node.context.carries_turns
    return count is not None and count[0] == 1


def is_turn(facts, tensor):
    """Tells whether a number, or the first one of an index, is that of the turn of a loop over the tower's examples."""
    source = source_of(tensor)
    if source.op.type in READS:  # of a list of the rows' numbers
        return isinstance(facts.placements.get(end_of(source)), Turn)
    return end_of(source) in facts.counters or facts.follows_turns and source.op.type in MERGES and _is_counter(
        source.op) and is_over_rows(facts, source.op)


def counters_of_body(facts, node, test, turn):
    """Returns the inputs of a loop's bodies that count the turns of one over the tower's examples, a set of int.

    Args:
      facts: `towers.sharding.plan.facts.Facts`.
      node: `Node` of the loop.
      test, turn: `towers.sharding.bodies.Body`, its condition and its body.
    """
    if not facts.follows_turns or facts.carries_turns and facts.is_inner:
        return set()
    numbers = {end_of(tensor): k for k, tensor in enumerate(test.inputs)}
    counters = {k for k, tensor in enumerate(turn.inputs) if _is_0(node.inputs[k].tensor) and is_next(
        source_of(turn.outputs[k]).op, tensor)}
    is_found = _holds_until_last_row(facts, test.outputs[0], lambda number, bound: numbers.get(
        end_of(number)) in counters and _bounds(facts, node, bound, numbers))
    return counters if is_found else set()


def _bounds(facts, node, bound, numbers):
    """Tells whether a number that a loop's condition takes, or computes of a shape, is that of the tower's examples."""
    if end_of(bound) in numbers:
        return facts.counts_rows(node.inputs[numbers[end_of(bound)]].tensor)
    shape = bound.op.inputs[0].op if bound.op.type == "StridedSlice" else None
    of = numbers.get(end_of(source_of(shape.inputs[0]))) if shape is not None and shape.type == "Shape" else None
    if of is None:
        return facts.counts_rows(bound)
    return is_list_of_rows(facts, node.inputs[of].placement) and not np.any(static_value(bound.op.inputs[1]))


def is_over_rows(facts, merge):
    """Tells whether what is handed from turn to turn belongs to a loop of control flow 1 with as many turns as examples."""
    flow = control_flow_of(merge)
    # One loop's rows are not the other's, and nothing that is made in a branch can be met about before that.
    is_within = facts.carries_turns and (facts.is_inner or flow is not None and outer_control_flow(flow) is not None)
    return handed_back(merge) is not None and not is_within and _takes_rows(facts, flow)


def is_within_turn(facts, op):
    """Tells whether an op stands in a loop over the tower's examples that stays the tower's own, in whatever branch or loop."""
    return facts.carries_turns and (facts.is_in_turn or not facts.is_inner and any(
        is_loop(flow) and _takes_rows(facts, flow) for flow in flows_around(op)[-1:]))


def _takes_rows(facts, loop):
    return _holds_until_last_row(facts, condition_of(loop), lambda number, bound: (
        number.op.type in MERGES and _is_counter(number.op) and facts.counts_rows(bound)))


def _holds_until_last_row(facts, condition, is_of_rows):
    """Tells whether a loop compares numbers of its turn and of the examples, and if it stays the tower's own nothing else."""
    found, others = [], []
    stack = [condition]
    while stack:
        op = stack.pop().op
        if op.type in ("Identity", "LogicalAnd"):
            stack.extend(op.inputs)
        elif op.type == "Less":
            found.append(is_of_rows(*map(source_of, op.inputs)))
        else:
            others.append(op)
    return bool(found) and all(found) and not others if facts.carries_turns else any(found)


def ends_loop(op):
    """Tells whether a comparison does nothing but end a loop."""
    stack = list(op.outputs[0].consumers())
    while stack:
        consumer = stack.pop()
        if consumer.type in ("Identity", "LogicalAnd"):
            stack.extend(consumer.outputs[0].consumers())
        elif consumer.type != "LoopCond":
            return False
    return True


def handed_back(merge):
    """Returns what a loop of control flow 1 hands from a turn to the next in a `Merge`, a tensor of that turn, or None."""
    return next((tensor.op.inputs[0] for tensor in merge.inputs if tensor.op.type in LOOPS_BACK), None)


def source_of(tensor):
    """Returns the number that a tensor hands on, or that stands first in it."""
    while True:
        op = tensor.op
        keeps_number = op.type == "Cast" and {op.inputs[0].dtype.base_dtype, op.outputs[0].dtype.base_dtype} <= _NUMBERS
        if op.type == "Enter" and op.get_attr("is_constant") or keeps_number or op.type in ("Identity", "Switch") or (
                op.type in IN_FRONT):
            tensor = op.inputs[0]
        else:
            return tensor


def is_next(op, number):
    """Tells whether an op adds 1 to a number."""
    pairs = (tuple(op.inputs), tuple(op.inputs)[::-1]) if op.type in ("Add", "AddV2") else ()
    return any(source_of(one) is number and static_value(other) == 1 for one, other in pairs)


def _is_0(tensor):
    value = static_value(tensor) if tensor.dtype.is_integer else None
    return value is not None and value.shape == () and value == 0


def _is_counter(merge):
    """Tells whether a loop of control flow 1 counts its turns in a `Merge`, from 0 on."""
    enters, nexts = ([tensor.op for tensor in merge.inputs if tensor.op.type.endswith(kind)]
                     for kind in ("Enter", "NextIteration"))
    return len(enters) == len(nexts) == 1 and merge.outputs[0].shape.rank == 0 and _is_0(enters[0].inputs[0]) and is_next(
        nexts[0].inputs[0].op, merge.outputs[0])
