"""Loops of the graph over the tower's examples, whose turn i takes example i: `tf.map_fn`, or `x[i]` in a `tf.while_loop`."""
import numpy as np

from towers.graph_walk import EXITS, MERGES, end_of
from towers.sharding.bodies import BODIES
from towers.sharding.nodes import Refused, Unfit
from towers.sharding.placements import BATCH, Additive, InTurn, Listed, Partial, Running, Shard, size_of
from towers.static_values import static_value

__all__ = ["counters_of_body", "is_list_of_rows", "is_turn", "joined_in_turn", "number_of_rows", "of_turns", "row_read",
           "takes_its_row"]

_HANDS_ON = frozenset("Identity Switch RefSwitch NextIteration RefNextIteration Enter RefEnter Exit RefExit".split())
_SUMS = frozenset("Add AddN AddV2 Sub".split())
_IN_FRONT = frozenset(["ConcatV2", "ExpandDims", "Pack", "Reshape"])  # of an index: the number of its row stands first


def number_of_rows(times):
    """Returns the `Size` of so many rows for each example."""
    found = np.empty((), object)
    found[()] = Additive(times, BATCH)
    return size_of(found)


def is_list_of_rows(facts, placement):
    """Tells whether a list that is made of what has a placement has an element for each example, which loops take in turn."""
    return facts.follows_turns and type(placement) is Shard and (placement.axis, placement.rows, placement.times) == (0, BATCH, 1)


def row_read(node, k):
    """Raises `Refused` where an element of a list of examples, the k-th input, is read by another number than the turn's."""
    placement = node.inputs[k].placement
    if isinstance(placement, Listed) and placement.by_row and not is_turn(node.context, node.inputs[1].tensor):
        raise Refused("%r takes one of a list of the tower's examples by its place." % node.op.name)


def takes_its_row(node, begin, end=None):
    """Tells whether an op takes of the examples the one of the turn.

    Args:
      node: `Node`, whose first input holds the examples.
      begin: int, the input that says which is the first one.
      end: int, the input that says where it ends; None where it takes one.
    """
    if not is_list_of_rows(node.context, node.inputs[0].placement) or not is_turn(node.context, node.inputs[begin].tensor):
        return False
    return end is None or bool(node.attr("shrink_axis_mask") & 1) or _is_next(
        _source(node.inputs[end].tensor).op, _source(node.inputs[begin].tensor))


def is_turn(facts, tensor):
    """Tells whether a number, or the first one of an index, is that of the turn of a loop over the tower's examples."""
    source = _source(tensor)
    return end_of(source) in facts.counters or facts.follows_turns and source.op.type in MERGES and _is_counter(
        source.op) and _is_over_rows(facts, source.op)


def counters_of_body(facts, node, test, turn):
    """Returns the inputs of a loop's bodies that count the turns of one over the tower's examples, a set of ends.

    Args:
      facts: `towers.sharding.propagation.Facts`.
      node: `Node` of the loop.
      test, turn: `towers.sharding.bodies.Body`, its condition and its body.
    """
    numbers = {end_of(tensor): k for k, tensor in enumerate(test.inputs)}
    counters = [k for k, tensor in enumerate(turn.inputs) if _is_0(node.inputs[k].tensor) and _is_next(
        _source(turn.outputs[k]).op, tensor)]
    for less in _comparisons(test.outputs[0]):
        number, bound = map(_source, less.inputs)
        if numbers.get(end_of(number)) in counters and _bounds(facts, node, bound, numbers):
            return {end_of(turn.inputs[k]) for k in counters}
    return set()


def _bounds(facts, node, bound, numbers):
    """Tells whether a number that a loop's condition takes, or computes of a shape, is that of the tower's examples."""
    if end_of(bound) in numbers:
        return facts.counts_rows(node.inputs[numbers[end_of(bound)]].tensor)
    shape = bound.op.inputs[0].op if bound.op.type == "StridedSlice" else None
    of = numbers.get(end_of(_source(shape.inputs[0]))) if shape is not None and shape.type == "Shape" else None
    if of is None:
        return facts.counts_rows(bound)
    return is_list_of_rows(facts, node.inputs[of].placement) and not np.any(static_value(bound.op.inputs[1]))


def of_turns(node, rule):
    """Decides for an op that computes of one of the examples, in its turn."""
    running = node.of(Running)
    if node.type in BODIES or rule is not None and Listed in rule.knows and any(
            isinstance(value.placement, Listed) for value in node.inputs) or node.type.startswith(("TensorArray", "TensorList")):
        return _of_lists(node, rule)
    if rule is not None and InTurn in rule.knows:
        try:
            return rule.function(node)
        except Unfit:
            pass
    others = node.wanted(k for k, value in enumerate(node.inputs) if not isinstance(value.placement, (InTurn, Running)))
    if running:
        if node.type in _HANDS_ON:
            ends = node.type in EXITS
            return node.decide(Partial() if ends else Running(), others)
        if node.type in _SUMS and len(running) == 1 and not (node.type == "Sub" and running == [1]):
            return node.decide(Running(), others)
        return node.decide(InTurn(), {**others, **node.wanted(running)})
    if node.type in EXITS and _is_over_rows(node.context, node.op.inputs[0].op.inputs[0].op):
        raise Refused("%r is what a loop over the tower's examples made of the last of them." % node.op.name)
    return node.decide(InTurn(), others)


def _of_lists(node, rule):
    try:
        return rule.function(node)
    except Unfit:
        raise Refused("%r computes of one example in the turn of a loop, in a way that is not followed." % node.op.name) from None


def joined_in_turn(node, numbers):
    """Returns wants and the placement of what is one input or the other, some of which are an example's own."""
    found = [node.inputs[k].placement for k in numbers]
    others = node.wanted(k for k in numbers if not isinstance(node.inputs[k].placement, (InTurn, Running)))
    if all(isinstance(placement, Running) for placement in found):
        return others, Running()
    if node.is_over_rows or node.type in MERGES and _is_over_rows(node.context, node.op):
        return others, Running()
    if any(isinstance(placement, Running) for placement in found):
        return {**others, **node.wanted(numbers)}, InTurn()
    return others, InTurn()


def _source(tensor):
    """Returns the number that a tensor hands on, or that stands first in it."""
    while True:
        op = tensor.op
        if op.type == "Enter" and op.get_attr("is_constant") or op.type in ("Identity", "Switch", "Cast") or op.type in _IN_FRONT:
            tensor = op.inputs[0]
        else:
            return tensor


def _is_next(op, number):
    """Tells whether an op adds 1 to a number."""
    pairs = (tuple(op.inputs), tuple(op.inputs)[::-1]) if op.type in ("Add", "AddV2") else ()
    return any(_source(one) is number and static_value(other) == 1 for one, other in pairs)


def _is_0(tensor):
    value = static_value(tensor) if tensor.dtype.is_integer else None
    return value is not None and value.shape == () and value == 0


def _is_counter(merge):
    """Tells whether a loop of control flow 1 counts its turns in a `Merge`, from 0 on."""
    enters, nexts = ([tensor.op for tensor in merge.inputs if tensor.op.type.endswith(kind)]
                     for kind in ("Enter", "NextIteration"))
    return len(enters) == len(nexts) == 1 and merge.outputs[0].shape.rank == 0 and _is_0(enters[0].inputs[0]) and _is_next(
        nexts[0].inputs[0].op, merge.outputs[0])


def _is_over_rows(facts, merge):
    """Tells whether what is handed from turn to turn belongs to a loop of control flow 1 with as many turns as examples."""
    for switch in merge.outputs[0].consumers():
        if switch.type in ("Switch", "RefSwitch") and switch.inputs[1].op.type == "LoopCond":
            for less in _comparisons(switch.inputs[1].op.inputs[0]):
                number, bound = map(_source, less.inputs)
                if number.op.type in MERGES and _is_counter(number.op) and facts.counts_rows(bound):
                    return True
    return False


def _comparisons(condition):
    """Returns the ops that compare two numbers, all of which have to hold, a list."""
    found, stack = [], [condition]
    while stack:
        op = stack.pop().op
        if op.type in ("Identity", "LogicalAnd"):
            stack.extend(op.inputs)
        elif op.type == "Less":
            found.append(op)
    return found
