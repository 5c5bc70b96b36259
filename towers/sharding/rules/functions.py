"""Branches and loops of control flow 2, and calls of functions: placements are carried through what they call.

Where towers have to meet within, what they meet about is computed outside, before, as far as that is known there. Where a loop's
turns would have to meet about what changes from turn to turn, all that it takes is made whole before it, so that all towers
compute the same.
"""
import copy
import dataclasses
from typing import Any, Dict, List, NamedTuple

from towers.graph.op_types import BODIES
from towers.graph.private import position_of
from towers.graph.walk import end_of, writes_of
from towers.sharding.bodies import is_stateful
from towers.sharding.nodes import AsPartial, Decision, Node, OwnRows, Refused, Replicated, ShapeOf, Unfit, Value
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, InTurn, Listed, Own, Partial, PartialMean, Replicate,
                                        RowNumbers, Running, Shard, Size, Turn)
from towers.sharding.rules.in_turn import check_state, chosen_in_turn, refuse_effects
from towers.sharding.rules.lists import joined
from towers.sharding.rules.table import ANY, RULES, rule
from towers.sharding.rules.turns import counters_of_body, is_turn, number_of_rows

__all__ = ["Carried", "Inner", "READS", "is_counted", "is_made_within"]

READS = frozenset(["ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarHandleOp"])
_MOST_TURNS = 20
_WRITTEN_INTO = frozenset(["TensorListSetItem", "TensorListPushBack"])
_WRITTEN = _WRITTEN_INTO | {"TensorListFromTensor", "TensorListScatter", "TensorListScatterV2"}  # what is made of examples


class _Unknown(Exception):
    """What towers would have to meet about is known only within a branch, loop or function."""

    def __init__(self, op):
        super().__init__(op.name)
        self.op = op


class Inner(NamedTuple):
    """A plan of a function that an op calls.

    Attributes:
      body: `towers.sharding.bodies.Body`.
      plan: `towers.sharding.plan.propagation.Plan`.
      returns: dict from numbers of its outputs to what they are wanted as, see `Decision.wants`.
      varying: frozenset of int, the inputs that are other ones from turn to turn.
    """
    body: Any
    plan: Any
    returns: Dict[int, Any]
    varying: Any

    def placement(self, tensor):
        """Returns the `Placement` of a tensor of the function."""
        return self.plan.placements.get(end_of(tensor), Replicate())


@dataclasses.dataclass
class Carried:
    """What stands for an op that calls functions: the same op, whose functions are carried out by their plans.

    Attributes:
      inners: list of `Inner`.
      outside: set of int, the inputs that are needed outside of all branches and loops that the op stands in.
    """
    inners: List[Inner]
    outside: Any

    def __call__(self, conversions, op, inputs):
        return conversions.carried(self, op, inputs)

    @property
    def changes(self):
        """Tells whether a plan changes anything."""
        return any(inner.returns for inner in self.inners) or any(
            not isinstance(decision.instead, Carried) or decision.wants or decision.instead.changes
            for inner in self.inners for decision in inner.plan.decisions.values())


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
        if not _is_of_batch(like) or want.outer is None:
            raise _Unknown(want.like[0].op)
        return OwnRows(want.axis, Additive(like.times, BATCH), want.outer)


def _is_of_batch(placement):
    return isinstance(placement, (Shard, Blocks)) and placement.rows == BATCH and placement.times is not None


# What is made where: within a branch or loop, or outside.

def is_made_within(inner, tensor, want):
    """Tells whether a conversion can be made within a branch or loop, as no towers meet for it."""
    placement = inner.placement(tensor)
    if isinstance(want, (Replicated, ShapeOf)):
        return isinstance(placement, Replicate) or _is_known_within(inner, tensor)
    if isinstance(want, AsPartial):
        return isinstance(placement, (Partial, Replicate)) or isinstance(placement, PartialMean) and placement.rows == BATCH
    if isinstance(want, OwnRows):
        return isinstance(placement, Replicate) and is_counted(inner, want)
    return isinstance(placement, RowNumbers) and placement.of.rows == BATCH and placement.of.times is not None


def is_counted(inner, rows):
    """Tells whether a tower's own rows are told by how many examples it has."""
    if isinstance(rows.like, Additive):
        return rows.like.rows == BATCH and rows.like.times is not None
    return _is_of_batch(inner.placement(rows.like[0]))


def _is_known_within(inner, tensor):
    """Tells whether a size is computed within, as the whole batch's, of nothing but how many examples there are."""
    placement = inner.placement(tensor)
    if not isinstance(placement, Size):
        return isinstance(placement, Replicate)
    op = tensor.op
    if op.type == "Const":
        return True
    if not any(element is COMPUTED for element in placement.elements):
        return all(not isinstance(element, Additive) or element.rows == BATCH and element.times is not None
                   for element in placement.elements)
    if op.type in ("Shape", "Size", "ShapeN") or not op.inputs:
        return False
    return all(_is_known_within(inner, source) for source in op.inputs)


def _needed_outside(inner):
    """Yields the tensors of a function that are needed outside of it, for towers to meet about them."""
    for op, decision in inner.plan.decisions.items():
        for k, want in decision.wants.items():
            if not is_made_within(inner, op.inputs[k], want):
                yield op.inputs[k]
        if isinstance(decision.instead, Carried):
            for k in decision.instead.outside:
                yield op.inputs[k]
        elif decision.instead and decision.meets:
            for output in op.outputs:
                yield output
        for number, rows in decision.own.items():
            if not is_counted(inner, rows):
                yield op.outputs[number]
    for number, want in inner.returns.items():
        if not is_made_within(inner, inner.body.outputs[number], want):
            yield inner.body.outputs[number]


def _outside(inner, bodies):
    """Returns the numbers of the inputs that are needed outside of a function, a set; `_Unknown` where something else is."""
    numbers = {end_of(tensor): k for k, tensor in enumerate(inner.body.inputs)}
    found, seen, stack = set(), set(), list(_needed_outside(inner))
    writes = _writes(inner.body, bodies)
    while stack:
        tensor = stack.pop()
        k = numbers.get(end_of(tensor))
        if k is not None:
            if k in inner.varying:
                raise _Unknown(tensor.op)
            found.add(k)
        elif tensor.op not in seen:
            seen.add(tensor.op)
            if not _is_repeatable(tensor.op, bodies, writes):
                raise _Unknown(tensor.op)
            stack.extend(tensor.op.inputs)
    return found


def _is_repeatable(op, bodies, writes):
    """Tells whether an op computes the same outside of the function that it stands in."""
    if not is_stateful(op):
        return True
    if op.type in BODIES:
        return all(_is_repeatable(each, bodies, writes) for body in bodies.of(op) for each in body.ops)
    return op.type in READS and not writes


def _writes(body, bodies):
    if writes_of(body.ops):
        return True
    return any(_writes(each, bodies) for op in body.ops if op.type in BODIES for each in bodies.of(op))


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
    except (_Unknown, Refused) as error:
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
    except _Unknown as error:
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
        outside |= {first + k for k in _outside(inner, node.context.bodies)}
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
        raise _Unknown(node.op)
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
