"""What the turns of loops over the tower's examples compute, see `towers.sharding.rules.loops.turns`: each of its own example.

Such a loop stays each tower's own, as what its turns make of their examples is put together in the order of the towers, and what
they add up is a sum's parts. What does not fit, the number of a turn in use as a number say, is refused, and the loop is made the
whole batch's then.
"""
from towers.graph.op_types import BODIES, ENTERS, EXITS, MERGES, VARIABLES
from towers.graph.private import chosen_by, control_flow_of, flows_around
from towers.graph.static_values import static_value
from towers.graph.walk import end_of
from towers.sharding.bodies import is_stateful
from towers.sharding.nodes import AsPartial, Refused, Unfit
from towers.sharding.placements import InTurn, Listed, Own, Partial, Replicate, Running, Shard, Turn
from towers.sharding.rules.loops.turns import (IN_FRONT, READS, ends_loop, handed_back, is_next, is_over_rows, is_turn,
                                               is_within_turn, number_of_rows, numbers_all_rows, source_of)

__all__ = ["check_state", "chosen_in_turn", "has_all_rows", "is_drawn_in_turn", "is_stack_of_rows", "joined_in_turn", "of_number",
           "of_turns", "refuse_effects", "refuse_other_states", "refuse_rows", "state_of_turn"]

_HANDS_ON = frozenset("Identity Switch RefSwitch NextIteration RefNextIteration Enter RefEnter Exit RefExit".split())
_SUMS = frozenset("Add AddN AddV2 Sub".split())
_SLICES = {"Gather": (1,), "GatherV2": (1,), "Slice": (1,), "StridedSlice": (1, 2)}  # where the number of a row stands
_AT = dict(_SLICES, TensorArrayReadV3=(1,), TensorArrayWriteV3=(1,), TensorListGetItem=(1,), TensorListSetItem=(1,))
_WITHOUT_EFFECTS = VARIABLES | frozenset("Assert ReadVariableOp ResourceGather ResourceGatherNd VariableShape".split())
_ON_ITS_WAY = IN_FRONT | _HANDS_ON - EXITS | {"Cast"}


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
        total = node.inputs[running[0]].placement
        if node.type in _HANDS_ON:
            is_whole = node.type in EXITS and is_over_rows(node.context, _merge_of(node.op))
            return node.decide(Partial() if is_whole else total, others)
        is_number = node.outputs[0].dtype.is_floating or node.outputs[0].dtype.is_integer or node.outputs[0].dtype.is_complex
        if node.type in _SUMS and is_number and len(running) == 1 and not (node.type == "Sub" and running == [1]):
            return node.decide(total, others)
        return node.decide(InTurn(), {**others, **node.wanted(running)})
    if node.type in EXITS and is_over_rows(node.context, _merge_of(node.op)):
        raise Refused("%r is what a loop over the tower's examples made of the last of them." % node.op.name)
    return node.decide(InTurn(), others)


def _merge_of(leaves):
    """Returns where a loop keeps what an `Exit` hands out of it."""
    return leaves.inputs[0].op.inputs[0].op


def _of_lists(node, rule):
    try:
        return rule.function(node)
    except Unfit:
        raise Refused("%r computes of one example in the turn of a loop, in a way that is not followed." % node.op.name) from None


def is_drawn_in_turn(node):
    """Tells whether an op draws random numbers for an example in its turn: other ones for each."""
    return is_within_turn(node.context, node.op) and is_stateful(node.op) and "seed" in node.op.node_def.attr


def of_number(node, decide):
    """Decides for an op that takes the number of the turn: it reads or writes what is the turn's, or the loop's end.

    Args:
      node: `Node`.
      decide: a function of a node that returns its `Decision` where the number is replicated.
    """
    numbers, of = node.of(Turn), node.inputs[0].placement
    if node.type in _ON_ITS_WAY and numbers == [0]:
        return node.decide(Turn(), node.wanted(set(range(1, len(node.inputs))).difference(node.of(InTurn))))
    if node.type in EXITS and is_over_rows(node.context, _merge_of(node.op)):
        return node.decide(number_of_rows(1))
    if any(is_next(node.op, source_of(node.inputs[k].tensor)) for k in numbers):
        return node.decide(Turn())
    if node.type == "Less" and numbers == [0] and is_turn(node.context, node.inputs[0].tensor) and ends_loop(
            node.op) and node.context.counts_rows(source_of(node.inputs[1].tensor)):
        return node.decide(Replicate())
    if set(numbers) <= set(_AT.get(node.type, ())) and isinstance(of, (Shard,) if node.type in _SLICES else (Replicate, Listed)):
        for k in numbers:
            node.inputs[k].placement = Replicate()
        decision = decide(node)
        for k in numbers:
            node.inputs[k].placement = Turn()
        is_number = node.type in READS and isinstance(decision.outputs[0], Turn)
        is_own = node.type not in _SLICES or 0 not in decision.wants
        if is_number or is_own and all(isinstance(out, InTurn) or has_all_rows(out) for out in decision.outputs):
            return decision
    raise Refused("%r (%s) computes with the number of a turn of a loop over the tower's examples." % (node.op.name, node.type))


def has_all_rows(placement):
    """Tells whether a list has an element for each example."""
    return isinstance(placement, Listed) and placement.by_row is not None


def refuse_rows(node, k):
    """Raises `Refused` where an input is a list of what turns made of all examples, which is to be taken in a stack."""
    if node.context.carries_turns and has_all_rows(node.inputs[k].placement):
        raise Refused("%r takes what turns of a loop over the tower's examples made otherwise than in a stack." % node.op.name)


def is_stack_of_rows(node, k, numbers=None):
    """Tells whether an op stacks a list, its k-th input, of what each turn made of its example.

    Args:
      node: `Node`.
      k: int.
      numbers: int, the input that numbers what is taken of the list; None where all is.

    Raises:
      Refused: where towers of no examples would not know the shape of one, or others than all are taken.
    """
    placement = node.inputs[k].placement
    if not (has_all_rows(placement) and isinstance(placement.element, InTurn)):
        return False
    if node.context.carries_turns:
        dims = node.outputs[0].dims
        if dims is None or None in dims[1:] or node.is_repeated:
            refuse_rows(node, k)
        if numbers is not None:
            numbers_all_rows(node, numbers)
    return True


# What is handed from turn to turn.

def state_of_turn(node, numbers):
    """Returns the `Decision` for what turns count, or an example chooses, by control flow 1; None for what else is joined.

    Args:
      node: `Node`, a Merge.
      numbers: list of int, the inputs whose placements are known yet.
    """
    if is_turn(node.context, node.op.outputs[0]):
        return node.decide([Turn(), Own()])
    if node.of(Turn):
        raise Refused("%r is the number of a turn, or another one." % node.op.name)
    if _is_chosen_in_turn(node.op, node.context.placements) and not node.of(Listed):
        wants, placement = joined_in_turn(node, numbers)
        return node.decide([placement, InTurn()], wants)
    return None


def _is_chosen_in_turn(merge, placements):
    """Tells whether an example chooses between the branches of a tf.cond of control flow 1 that a Merge ends."""
    choice = chosen_by(merge)
    return choice is not None and isinstance(placements.get(end_of(choice)), InTurn)


def chosen_in_turn(name, placement):
    """Returns the placement of what an example, in its turn of a loop, chooses to be or not."""
    if isinstance(placement, Replicate):
        return InTurn()
    if isinstance(placement, (InTurn, Listed, Running)):
        return placement
    raise Refused("%r hands out %s, as an example chooses." % (name, placement))


def joined_in_turn(node, numbers):
    """Returns wants and the placement of what is one input or the other, some of which are an example's own."""
    found = [node.inputs[k].placement for k in numbers]
    totals = {placement for placement in found if isinstance(placement, Running)}
    is_loop = node.type in MERGES and handed_back(node.op) is not None
    if node.is_over_rows or is_loop and is_over_rows(node.context, node.op):
        if node.context.carries_turns:
            shapes = [node.inputs[k].dims for k in numbers]
            if None in shapes or any(None in shape or shape != shapes[0] for shape in shapes):
                raise Refused("%r is a sum over the tower's examples of a shape that they decide." % node.op.name)
            return {k: want for k in numbers for want in _entered(node.inputs[k])}, Running(node.name_of_state)
        return _others(node, numbers), Running()
    is_entered = is_loop and node.context.carries_turns and any(
        node.inputs[k].placement in totals and node.op.inputs[k].op.type in ENTERS for k in numbers)
    if len(totals) == 1 and (is_entered or all(placement in totals for placement in found)):
        return _others(node, numbers), totals.pop()
    return {**_others(node, numbers), **(node.wanted(numbers) if totals else {})}, InTurn()


def _others(node, numbers):
    """Returns wants by which all inputs but those of an example are whole, a dict."""
    return node.wanted(k for k in numbers if not isinstance(node.inputs[k].placement, (InTurn, Running)))


def _entered(value):
    """Returns a list of how a loop wants what it adds up upon, a `Value`, so that all towers' come to it once; empty for 0."""
    if isinstance(value.placement, (InTurn, Running, Partial)) or _is_zero(value.tensor):
        return []
    if not value.dtype.is_floating:
        raise Refused("%r is no 0, and the turns of a loop over the tower's examples add to it." % value.tensor.name)
    return [AsPartial()]


def _is_zero(tensor):
    while tensor.op.type in ENTERS or tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    value = static_value(tensor)
    return value is not None and not value.any()


def refuse_other_states(plan, facts):
    """Raises `Refused` where a loop of control flow 1 hands to its next turn what is neither a sum nor a list of examples.

    Args:
      plan: `towers.sharding.plan.propagation.Plan`.
      facts: `towers.sharding.plan.facts.Facts`, of a tower whose loops over the examples stay its own.
    """
    loops = {control_flow_of(op) for op in plan.order if op.type in MERGES and is_over_rows(facts, op)}
    refuse_effects([op for op in plan.order if loops and not loops.isdisjoint(flows_around(op))], facts.bodies)
    for op in plan.order:
        if op.type in MERGES:
            placement, back = plan.placements.get((op, 0)), handed_back(op)
            if back is not None and (isinstance(placement, Running) or is_over_rows(facts, op)):
                check_state(op.name, placement, plan.placements.get(end_of(back)), _hands_on(back) is op.outputs[0])
            elif isinstance(placement, Replicate) and _is_chosen_in_turn(op, plan.placements):
                raise Refused("%r is chosen by an example." % op.name)


def refuse_effects(ops, bodies):
    """Raises `Refused` where the turns of a loop over the examples write, which each tower would do for its own alone."""
    for op in ops:
        if op.type in BODIES:
            for body in bodies.of(op):
                refuse_effects(body.ops, bodies)
        elif is_stateful(op) and op.type not in _WITHOUT_EFFECTS and not op.type.startswith("TensorArray") and (
                "seed" not in op.node_def.attr):
            raise Refused("%r (%s) has effects, or a state, in turns of a loop over the tower's examples." % (op.name, op.type))


def check_state(name, placement, back, is_kept):
    """Raises `Refused` where a turn of a loop over the examples takes more of the turns before than what they added up."""
    is_sum = isinstance(placement, Running) and placement == back
    is_list = has_all_rows(placement) and has_all_rows(back) and placement.of == back.of
    if not (is_kept or isinstance(placement, Turn) or is_sum or is_list):
        raise Refused("%r is what one turn of a loop over the tower's examples hands to the next." % name)


def _hands_on(tensor):
    while tensor.op.type in ("Identity", "Switch"):
        tensor = tensor.op.inputs[0]
    return tensor
