"""Loops of control flow 1 in a plan: in which of them towers would meet, and what they are given at their beginning."""
from towers.graph.op_types import ENTERS, LOOPS_BACK, MERGES
from towers.graph.private import loop_of
from towers.graph.walk import end_of
from towers.sharding.nodes import AsPartial, Numbered, OwnRows, Replicated
from towers.sharding.placements import Listed, Partial, PartialMean, Replicate, Size

__all__ = ["meeting_loops", "meets_for", "wanted_at_entry", "writers_of"]


def meets_for(want, placement):
    """Tells whether towers meet for a want."""
    if isinstance(want, Replicated):
        return not isinstance(placement, Replicate)
    return isinstance(want, (OwnRows, Numbered)) or isinstance(want, AsPartial) and not isinstance(
        placement, (Replicate, PartialMean, Partial))


def meeting_loops(plan, is_only_asked):
    """Returns the loops of control flow 1 in whose turns towers would meet, a dict to an op that they would meet for.

    Args:
      plan: `Plan`.
      is_only_asked: whether the plan is not to be carried out, so that own rows need not be taken.
    """
    found = {}
    for op, decision in plan.decisions.items():
        loop = None if op.type in ENTERS else loop_of(op)
        if loop is None:
            continue
        for k, want in decision.wants.items():
            placement = plan.placements.get(end_of(op.inputs[k]), Replicate())
            if is_only_asked and isinstance(want, OwnRows):
                continue
            if meets_for(want, placement) and not _is_from_outside(op.inputs[k], placement):
                found[loop] = op
        if decision.instead and decision.meets or decision.own:
            found[loop] = op
    return found


def writers_of(plan, loops):
    """Returns the ops that write the lists which loops read, outside of these, a set."""
    found = set()
    stack = [op.inputs[0].op for op in plan.order if op.type in ENTERS and loop_of(op) in loops and isinstance(
        plan.placements.get((op, 0)), Listed)]
    while stack:
        op = stack.pop()
        if op.type.startswith("TensorArray") and len(op.inputs) == 4 and op not in found and loop_of(op) is None:
            found.add(op)
            stack.append(op.inputs[3].op)
        elif op.type == "Identity":
            stack.append(op.inputs[0].op)
    return found


def _is_from_outside(tensor, placement):
    """Tells whether what a loop reads is the same in all its turns, so that it can be made whole before the loop."""
    if isinstance(placement, Size):
        return True  # computed of whole sizes within
    stack, seen = [tensor.op], set()
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type in ENTERS:
            if not op.get_attr("is_constant"):
                return False
        elif op.type in MERGES or op.type in LOOPS_BACK or op.op_def is None or op.op_def.is_stateful:
            return False
        else:
            stack.extend(source.op for source in op.inputs)
    return True


def wanted_at_entry(plan):
    """Returns what a loop's first state is wanted as, where its turns hand on something else: a dict from Enters to pairs."""
    found = {}
    for op, decision in plan.decisions.items():
        for k, want in decision.wants.items() if op.type in MERGES else ():
            if op.inputs[k].op.type in ENTERS:
                found[op.inputs[k].op] = want, decision.outputs[0]
    return found
