"""Branches and loops of control flow 2, and calls of functions: placements are carried through what they call.

Where towers have to meet within, what they meet about is computed outside, before, as far as that is known there. Where a loop's
turns would have to meet about what changes from turn to turn, all that it takes is made whole before it, so that all towers
compute the same.
"""
import copy
import dataclasses
from typing import Any, NamedTuple

from towers.graph.op_types import BODIES
from towers.graph.private import position_of
from towers.graph.walk import end_of
from towers.sharding.bodies import is_stateful
from towers.sharding.nodes import Decision, Node, OwnRows, Refused, Replicated, Unfit, Value
from towers.sharding.placements import BATCH, Additive, InTurn, Listed, Own, Partial, Replicate, Running, Size, Turn
from towers.sharding.rules.control_flow.inner import READS, Carried, Inner, KnownWithin, is_of_batch, outside_of
from towers.sharding.rules.control_flow.lists import joined
from towers.sharding.rules.loops.in_turn import check_state, chosen_in_turn, refuse_effects
from towers.sharding.rules.loops.turns import counters_of_body, is_turn, number_of_rows
from towers.sharding.rules.table import ANY, RULES, rule

__all__ = []

_MOST_TURNS = 20
_WRITTEN_INTO = frozenset(["TensorListSetItem", "TensorListPushBack"])
_WRITTEN = _WRITTEN_INTO | {"TensorListFromTensor", "TensorListScatter", "TensorListScatterV2"}  # what is made of examples


class _Meet(Node):
    """What is one tensor or the other, as a branch or the turns of a loop have it."""

    name_of_state = ""

    def __init__(self, op, values, context):  # pylint: disable=super-init-not-called
        self.op, self.type, self.inputs, self.context = op, op.type, values, context
        self._outputs = None

    def join(self):
        """Returns wants and the placement, see `joined`."""
        numbers = list(range(len(self.inputs)))
        try:
            wants, placement = joined(self, numbers)
        except Unfit:
            wants, placement = self.wanted(numbers), Replicate()
        return {k: self._anywhere(want) for k, want in wants.items()}, placement

    def _anywhere(self, want):
        """Returns a want that names no tensor of another branch."""
        if not isinstance(want, OwnRows) or isinstance(want.like, Additive):
            return want
        like = next(value.placement for value in self.inputs if value.tensor is want.like[0])
        if not is_of_batch(like):
            raise KnownWithin(want.like[0].op)
        return OwnRows(want.axis, Additive(like.times, BATCH), want.outer)


# The rules.

def _through(node, body, values, is_whole, varying=(), is_turn=False):
    """Returns the `Inner` of a function that takes some of an op's inputs, a list of `Value`."""
    plan = node.through(node.op, body, [value.placement for value in values], is_whole, is_turn)
    return Inner(body, plan, {}, frozenset(varying))


def _value(node, inner, number):
    """Returns a function's output, a `Value`."""
    tensor = inner.body.outputs[number]
    return Value(tensor, inner.placement(tensor), node.context.whole_dims(tensor))


def _as_it_is_or_whole(node, decide_of):
    """Returns the `Decision` of an op by its inputs as they are, or if towers can't meet for that, by inputs made whole."""
    placements = [value.placement for value in node.inputs]
    try:
        if node.op not in node.context.whole_lists:
            return decide_of(node, {}, False)
    except (KnownWithin, Refused) as error:
        if node.context.carries_turns:
            raise Refused("%r can't stay the tower's own: %s" % (node.op.name, error)) from error
    _check_rules(node, node.op)
    wants = {}
    for k, value in enumerate(node.inputs):
        value.placement = placements[k]
        if isinstance(value.placement, Listed):
            _make_list_whole(node, value)
        elif not isinstance(value.placement, Replicate):
            wants[k] = Replicated()
            value.make_whole()
    try:
        decision = decide_of(node, wants, True)
    except KnownWithin as error:
        raise Refused("in %r, a %s, towers would have to meet about %r (%s), by what is known only there. "
                      "Compute it before, and outside of that." % (
                          node.op.name, node.type, error.op.name, error.op.type)) from error
    finally:
        for value, placement in zip(node.inputs, placements):
            value.placement = placement
    return decision


def _check_rules(node, op):
    """Refuses ops with state and without a rule: of the whole batch too they may compute other things in each tower."""
    for each in sorted((each for body in node.context.bodies.of(op) for each in body.ops), key=position_of):
        if each.type in BODIES:
            _check_rules(node, each)
        elif is_stateful(each) and each.inputs and each.type not in RULES and each.type not in READS:
            raise Refused("the op %r in %r is a %s, for which there is no rule. Call it outside of that, or "
                          "give it a rule, @towers.placement_rule(%r)." % (each.name, node.op.name, each.type, each.type))


def _make_list_whole(node, value):
    """Lets what is put into a list outside of a loop be made whole, which the loop takes whole."""
    element = value.placement.element
    if element is None or isinstance(element, Replicate):
        return
    stack = [value.tensor.op]
    while stack:
        op = stack.pop()
        if op.type in _WRITTEN or op.type in BODIES:
            node.context.whole_lists.add(op)
        if op.type in _WRITTEN_INTO:
            stack.append(op.inputs[0].op)
        elif op.type in ("AddN", "Identity", "ZerosLike"):
            stack.extend(source.op for source in op.inputs)
        elif op.type not in _WRITTEN and op.type not in BODIES and op.type not in ("TensorListReserve", "EmptyTensorList"):
            raise Refused("the list %r, which %r takes, would have to be the whole batch's" % (
                value.tensor.name, node.op.name))
    value.placement = Listed(Replicate())


@rule(" ".join(BODIES), ANY + (Own, Turn), always=True)
def called(node):
    decide_of = _decide_loop if node.type.endswith("While") else _decide_call if node.type.endswith("Call") else _decide_branches
    return _as_it_is_or_whole(node, decide_of)


def _carried(node, outputs, wants, inners):
    outside = set()
    for inner in inners:
        first = 1 if node.type not in ("While", "StatelessWhile") and not node.type.endswith("Call") else 0
        outside |= {first + k for k in outside_of(inner, node.context.bodies)}
    carried = Carried(inners, outside)
    return Decision(outputs, wants, instead=carried, meets="function" if outside else "")


def _count_within(node, values, bodies, varying=()):
    """Notes which inputs of an op's functions are the number of the turn that the op stands in."""
    for k, value in enumerate(values):
        if isinstance(value.placement, Turn) and k not in varying and is_turn(node.context, value.tensor):
            node.context.counters.update(end_of(body.inputs[k]) for body in bodies)


def _decide_call(node, wants, is_whole):
    body, = node.context.bodies.of(node.op)
    _count_within(node, node.inputs, [body])
    inner = _through(node, body, node.inputs, is_whole)
    outputs = [inner.placement(tensor) for tensor in body.outputs]
    for number, placement in enumerate(outputs):
        if _is_known_size([inner], placement):
            outputs[number], inner.returns[number] = Replicate(), Replicated()
    if not node.context.is_inner:  # it is inlined, where towers meet
        return Decision(outputs, wants, instead=Carried([inner], set()))
    return _carried(node, outputs, wants, [inner])


def _decide_branches(node, wants, is_whole):
    bodies = node.context.bodies.of(node.op)
    _count_within(node, node.inputs[1:], bodies)
    inners = [_through(node, body, node.inputs[1:], is_whole) for body in bodies]
    outputs = []
    for number in range(len(node.op.outputs)):
        of_branches, placement = _Meet(node.op, [_value(node, inner, number) for inner in inners], node.context).join()
        if _is_known_size(inners, placement):
            placement, of_branches = Replicate(), dict.fromkeys(range(len(inners)), Replicated())
        for k, want in of_branches.items():
            inners[k].returns[number] = want
        outputs.append(placement)
    if isinstance(node.inputs[0].placement, InTurn):
        outputs = [chosen_in_turn(node.op.name, placement) for placement in outputs]
    else:
        wants = {**node.wanted([0]), **wants}
    return _carried(node, outputs, wants, inners)


def _is_known_size(inners, placement):
    """Tells whether what functions hand out is a size, and they have sizes as constants: nobody could make the same of the whole
    batch's sizes outside of them, so it is made whole within.
    """
    return isinstance(placement, Size) and any(map(_knows_sizes, inners))


def _knows_sizes(inner):
    decisions = [inner.plan.decisions.get(op) for op in inner.body.ops]
    called = [each for decision in decisions for each in getattr(getattr(decision, "instead", None), "inners", ())]
    return any(op.type == "Const" and isinstance(inner.placement(op.outputs[0]), Size) for op in inner.body.ops) or any(
        map(_knows_sizes, called))


def _decide_loop(node, wants, is_whole):
    test, turn = node.context.bodies.of(node.op)
    varying = [k for k, tensor in enumerate(turn.outputs) if _source(tensor) is not turn.inputs[k]]
    _count_within(node, node.inputs, [test, turn], varying)
    counters = counters_of_body(node.context, node, test, turn)
    node.context.counters.update(end_of(turn.inputs[k]) for k in counters)
    numbers = counters if node.context.carries_turns else ()
    node.context.counters.update(end_of(test.inputs[k]) for k in numbers)
    entries = [_named(value, "%s:%d" % (node.op.name, k)) if numbers and k in varying else value
               for k, value in enumerate(node.inputs)]
    # What a state is known to be at first it is not in later turns.
    state = [_Placed(Turn()) if k in numbers else _Placed(Replicate()) if k in varying and isinstance(
        value.placement, Replicate) else value for k, value in enumerate(entries)]
    for _ in range(_MOST_TURNS):
        inner = _through(node, turn, state, is_whole, varying, bool(numbers))
        entry, placements = dict(wants), [value.placement for value in entries]
        for k in numbers:
            placements[k] = Turn()
        for k in set(varying).difference(numbers):
            meet = _Meet(node.op, [entries[k], _value(node, inner, k)], node.context)
            meet.is_over_rows, meet.name_of_state = bool(counters), "%s:%d" % (node.op.name, k)
            each, placements[k] = meet.join()
            if _is_known_size([inner], placements[k]):
                each, placements[k] = {0: Replicated(), 1: Replicated()}, Replicate()
            if 0 in each:
                entry[k] = each[0]
            if 1 in each:
                inner.returns[k] = each[1]
        is_same = placements == [value.placement for value in state]
        state = [_Placed(placement) for placement in placements]
        if is_same:
            break
    else:
        raise KnownWithin(node.op)
    if numbers:
        refuse_effects(turn.ops | test.ops, node.context.bodies)
    for k in varying if numbers else ():
        check_state(node.op.name, placements[k], inner.placement(turn.outputs[k]), False)
    first = _through(node, test, state, is_whole, varying)
    if isinstance(first.placement(test.outputs[0]), InTurn):
        for k in varying:
            placements[k] = chosen_in_turn(node.op.name, placements[k])
    elif not isinstance(first.placement(test.outputs[0]), Replicate):
        first.returns[0] = Replicated()
    for k, placement in enumerate(placements):
        if isinstance(placement, Turn):
            placements[k] = number_of_rows(1)
        elif counters and isinstance(placement, Running):
            placements[k] = Partial()
        elif numbers and isinstance(placement, Listed):
            placements[k] = dataclasses.replace(placement, of=node.inputs[k].placement.of)
    return _carried(node, placements, entry, [first, inner])


def _named(value, name):
    """Returns what a loop takes as its first state, a `Value`; a list is told from the loop's other ones by a name."""
    if isinstance(value.placement, Listed):
        value = copy.copy(value)
        value.placement = dataclasses.replace(value.placement, of=name)
    return value


class _Placed(NamedTuple):
    placement: Any


def _source(tensor):
    """Returns what a function hands out as it takes it."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
