"""Loops of the graph over the tower's examples, whose turn i takes example i: `tf.map_fn`, or `x[i]` in a `tf.while_loop`."""
import numpy as np

from towers.graph_walk import end_of
from towers.private import control_flow_of
from towers.sharding.bodies import BODIES
from towers.sharding.nodes import Refused, Unfit
from towers.sharding.placements import BATCH, Additive, InTurn, Listed, Partial, Replicate, Running, Shard, size_of
from towers.static_values import static_value

__all__ = ["counters_of_body", "is_list_of_rows", "is_turn", "joined_in_turn", "number_of_rows", "of_turns", "row_read",
           "takes_its_row"]

_HANDS_ON = frozenset("Identity Switch RefSwitch NextIteration RefNextIteration Enter RefEnter Exit RefExit".split())
_SUMS = frozenset("Add AddN AddV2 Sub".split())
_MERGES = frozenset(["Merge", "RefMerge"])
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
    if end is None:
        return True
    if node.attr("shrink_axis_mask") & 1:
        return True
    stop = _source(node.inputs[end].tensor)
    return stop.op.type in ("Add", "AddV2") and _is_next(stop.op, _source(node.inputs[begin].tensor))


def is_turn(facts, tensor):
    """Tells whether a number, or the first one of an index, is that of the turn of a loop over the tower's examples."""
    source = _source(tensor)
    if end_of(source) in facts.counters:
        return True
    return facts.follows_turns and source.op.type in _MERGES and _is_counter(source.op) and _is_over_rows(facts, source.op)


def counters_of_body(facts, node, test, turn):
    """Returns the inputs of a loop's bodies that count the turns of one over the tower's examples, a set of ends.

    Args:
      facts: `towers.sharding.propagation.Facts`.
      node: `Node` of the loop.
      test, turn: `towers.sharding.bodies.Body`, its condition and its body.
    """
    numbers = {end_of(tensor): k for k, tensor in enumerate(test.inputs)}
    counters = [k for k, tensor in enumerate(turn.inputs) if static_value(node.inputs[k].tensor) is not None and (
        static_value(node.inputs[k].tensor).shape == () and static_value(node.inputs[k].tensor) == 0) and (
            _source(turn.outputs[k]).op.type in ("Add", "AddV2") and _is_next(_source(turn.outputs[k]).op, tensor))]
    for less in _comparisons(test.outputs[0]):
        number, bound = [numbers.get(end_of(_source(tensor))) for tensor in less.inputs]
        if number in counters and bound is not None and facts.counts_rows(node.inputs[bound].tensor):
            return {end_of(turn.inputs[k]) for k in counters}
    return set()


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
            ends = node.type in ("Exit", "RefExit")
            return node.decide(Partial() if ends else Running(), others)
        if node.type in _SUMS and len(running) == 1 and not (node.type == "Sub" and running == [1]):
            return node.decide(Running(), others)
        return node.decide(InTurn(), {**others, **node.wanted(running)})
    if node.type in ("Exit", "RefExit") and _is_loop_over_rows(node.context, node.op):
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
    is_over_rows = getattr(node, "is_over_rows", False) or node.type in _MERGES and _is_loop_over_rows(node.context, node.op)
    if is_over_rows:
        return others, Running()
    if any(isinstance(placement, Running) for placement in found):
        return {**others, **node.wanted(numbers)}, InTurn()
    return others, InTurn()


def _source(tensor):
    """Returns the number that a tensor hands on, or that stands first in it."""
    while True:
        op = tensor.op
        if op.type == "Enter" and _is_constant(op) or op.type in ("Identity", "Switch", "Cast") or op.type in _IN_FRONT:
            tensor = op.inputs[0]
        else:
            return tensor


def _is_constant(enter):
    return enter.get_attr("is_constant")


def _is_next(addition, number):
    """Tells whether an op adds 1 to a number."""
    return any(_source(one) is number and static_value(other) == 1 for one, other in (
        tuple(addition.inputs), tuple(addition.inputs)[::-1]))


def _is_counter(merge):
    """Tells whether a loop of control flow 1 counts its turns in a `Merge`, from 0 on."""
    enters = [tensor.op for tensor in merge.inputs if tensor.op.type in ("Enter", "RefEnter")]
    nexts = [tensor.op for tensor in merge.inputs if tensor.op.type in ("NextIteration", "RefNextIteration")]
    if len(enters) != 1 or len(nexts) != 1 or merge.outputs[0].shape.rank != 0:
        return False
    added = nexts[0].inputs[0].op
    return static_value(enters[0].inputs[0]) == 0 and added.type in ("Add", "AddV2") and _is_next(added, merge.outputs[0])


def _is_over_rows(facts, merge):
    """Tells whether the loop that a counter belongs to has as many turns as the tower has examples."""
    switches = [consumer for consumer in merge.outputs[0].consumers() if consumer.type in ("Switch", "RefSwitch")]
    for switch in switches:
        condition = switch.inputs[1].op
        if condition.type != "LoopCond":
            continue
        for less in _comparisons(condition.inputs[0]):
            number, bound = less.inputs
            if _source(number).op.type in _MERGES and _is_counter(_source(number).op) and facts.counts_rows(_source(bound)):
                return True
    return False


def _is_loop_over_rows(facts, op):
    """Tells whether an op of control flow 1 belongs to a loop over the tower's examples itself, and not to one within."""
    flow = control_flow_of(op)
    if op.type in ("Exit", "RefExit"):
        merge = op.inputs[0].op.inputs[0].op
    else:
        merge = op
    if merge.type not in _MERGES:
        return False
    switch = next((each for each in merge.outputs[0].consumers() if each.type in ("Switch", "RefSwitch") and
                   each.inputs[1].op.type == "LoopCond"), None)
    if switch is None:
        return False
    return any(_source(less.inputs[0]).op.type in _MERGES and _is_counter(_source(less.inputs[0]).op) and facts.counts_rows(
        _source(less.inputs[1])) for less in _comparisons(switch.inputs[1].op.inputs[0]))


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
