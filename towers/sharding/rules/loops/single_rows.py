"""What Python's own loop over the examples makes of one of them, and what puts all turns together again."""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.context import may_differ
from towers.graph.op_types import BODIES
from towers.graph.walk import is_ref
from towers.sharding.nodes import AsPartial, Decision, Refused, TakenByPlace, Unfit
from towers.sharding.placements import BATCH, Blocks, OneRow, Partial, RowSum, Rows, Shard

__all__ = ["constant_of_a_turn", "drawn_in_a_turn", "of_single_rows", "row_taken", "takes_row_of"]

_TAKES = ("Gather", "GatherV2", "Slice", "StridedSlice")
# They have effects for TensorFlow, and change nothing.
_LOOKS_ON = ("Assert", "CheckNumerics", "CheckNumericsV2", "Print", "ResourceGather", "ResourceGatherNd")


def row_taken(node, positions):
    """Decides for an op that takes a row by the number of its turn; raises `Unfit` where it takes something else.

    Args:
      node: `Node`.
      positions: dict from numbers of inputs to pairs: the element of that constant which is the number, None where it has one
        element alone, and how much more than the number it is; None for that is a count, which is the same in each turn.
    """
    row, placement = node.context.row_of(node.op), node.inputs[0].placement
    if row is None or type(placement) is not Shard or placement.rows != BATCH or placement.times != 1:
        raise Unfit()
    own = {}
    for k, (position, offset) in positions.items():
        tensor = node.inputs[k].tensor
        mine, theirs = tf.get_static_value(tensor), node.context.known(tensor)
        if mine is None or offset is not None and not node.context.varies(tensor.op):
            raise Unfit()
        theirs, at = np.array(mine if theirs is None else theirs), () if position is None else position
        wanted = (1, 1) if offset is None else (row.number + offset, row.number + node.context.first + offset)
        if (mine[at], theirs[at]) != wanted:
            raise Unfit()
        theirs[at] = mine[at]  # all else is as in the whole batch
        own[k] = tensor if np.array_equal(mine, theirs) else theirs

    def taken(conversions, op, inputs):
        return conversions.made(op, [tf.convert_to_tensor(own.get(k, source), source.dtype) for k, source in enumerate(inputs)])
    return node.decide(row, node.wanted(k for k in range(1, len(node.inputs)) if k not in positions), instead=taken)


def takes_row_of(op, count):
    """Tells whether an op may take a row, by its number, of what has so many of them."""
    return op.type in _TAKES and bool(op.inputs[0].shape.rank) and tf.dimension_value(op.inputs[0].shape[0]) == count


def drawn_in_a_turn(node, row, decision):
    """Returns the decision for what a turn draws: it is of its example, as the whole batch's model draws once for each."""
    if not node.op.op_def.is_stateful:
        return decision
    if decision.meets != "first":
        raise Refused("%r, a %s, draws for all examples in a turn of Python's own loop over them." % (node.op.name, node.type))
    return node.decide(row, decision.wants)


def constant_of_a_turn(row, value, dtype):
    """Returns the decision for a constant that turns have not alike, which is the whole batch's for the tower's example."""
    def made(*_):
        with may_differ():
            return [tf.constant(value, dtype)]
    return Decision([row], instead=made)


def of_single_rows(node, rule):
    """Decides for an op that takes what was made of single examples, or puts it together.

    Args:
      node: `Node`.
      rule: `towers.sharding.rules.table.Rule` of such ops, or None.
    """
    join = node.context.join_of(node.op)
    if join is not None:
        return _added(node, join) if join.kind == "Add" else _joined(node, join)
    if rule is not None and OneRow in rule.knows:
        try:
            return rule.function(node)
        except Unfit:
            pass
    rows = {value.placement for value in node.inputs if isinstance(value.placement, (OneRow, RowSum))}
    row = rows.pop()
    if rows or isinstance(row, RowSum) or _has_effects(node.op) or node.context.row_of(node.op) != row:
        raise TakenByPlace(
            "%r, a %s, takes %s of the tower's by its place. A loop of Python's over the examples is exact where each turn "
            "computes of its own example, without effects, and tf.stack, tf.concat, tf.add_n or + puts all turns together. "
            "Otherwise hand the batch in with an unknown size, tf.placeholder_with_default(x, [None, ...])."
            % (node.op.name, node.type, row))
    for body in node.context.bodies.of(node.op) if node.type in BODIES else ():
        for op in body.ops:
            if node.context.differs(op):
                raise Refused("%r, a constant in a function of %r, is not the same for all examples, or depends on their number. "
                              "Hand it to the function as a tensor." % (op.name, node.op.name))
    return node.decide(row, _others(node))


def _has_effects(op):
    return op.op_def is None or op.op_def.is_stateful and op.type not in _LOOKS_ON or any(map(is_ref, op.inputs))


def _others(node):
    return node.wanted(k for k, value in enumerate(node.inputs) if not isinstance(value.placement, (OneRow, RowSum)))


def _joined(node, join):
    """Decides for an op that puts all turns together."""
    turns = [next(value for value in node.inputs if value.tensor is turn) for turn in join.turns]
    if any(isinstance(value.placement, RowSum) or isinstance(value.placement, OneRow) and
           value.placement.number != number // join.times for number, value in enumerate(turns)):
        raise Refused("%r does not take all of the tower's examples, each once and in order." % node.op.name)
    if join.axis is None:
        return node.decide(Partial(), _others(node))
    axis = join.axis % node.outputs[0].rank
    lengths = {1 if join.kind == "Pack" else None if value.dims is None else value.dims[axis] for value in turns}
    length = lengths.pop()
    is_known = length is not None and not lengths
    if join.are_in_blocks:
        if not is_known:
            raise Refused("%r joins lists of examples whose sizes are not known." % node.op.name)
        return node.decide(Blocks(axis, join.times, BATCH, length), _others(node))
    return node.decide(Shard(axis, BATCH, length * join.times) if is_known else Shard(axis, Rows(node.op.name), 1), _others(node))


def _added(node, join):
    """Decides for an addition of one turn to those before it."""
    link = [op for op, _ in join.ops].index(node.op)
    last = link + 1 - len(join.others)  # the turn that it adds
    wants, count = _others(node), last + 1
    for k, value in enumerate(node.inputs):
        placement = value.placement
        if value.tensor is join.turns[last] or not (link or join.others) and value.tensor is join.turns[0]:
            continue
        if not link and value.dtype.is_floating:  # what the first turn is added to
            wants.pop(k, None)
            wants.update({} if isinstance(placement, Partial) else {k: AsPartial()})
        elif placement != RowSum(count - 1, len(join.turns)):
            raise Refused("%r does not add up the tower's examples, each once and in order." % node.op.name)
    return node.decide(Partial() if count == len(join.turns) else RowSum(count, len(join.turns)), wants)
