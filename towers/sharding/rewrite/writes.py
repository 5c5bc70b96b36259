"""Writes of a whole-batch model, which are the same in all towers: those in branches are left to the first tower.

Elsewhere `towers.state` lets the first tower's stand for the others'. No op of it can stand for one in a branch, whose results
pass gradients on, too; but of most writes in branches nothing is computed, they are only waited for.
"""
from towers.graph.op_types import CALLS
from towers.graph.ordering import takers_of
from towers.graph.private import control_flow_now, control_flow_of, wait_only_for, waiting_for
from towers.graph.walk import ancestors, descendants, end_of, op_of, writes_of
from towers.sharding.nodes import Replicated
from towers.sharding.placements import Replicate

__all__ = ["alike_writes", "leave_to_first"]


def alike_writes(plan):
    """Returns the ops of a tower that write what the whole batch comes to, a dict to lists of variables' ops."""
    return {op: variables for op, variables in writes_of(plan.order).items() if _is_alike(op, plan)}


def _is_alike(op, plan):
    wants = plan.decisions[op].wants if op in plan.decisions else {}
    return all(isinstance(plan.placements.get(end_of(tensor), Replicate()), Replicate) or isinstance(wants.get(k), Replicated)
               for k, tensor in enumerate(op.inputs))


def leave_to_first(writes, made, results):
    """Lets nothing of a later tower wait for writes in branches, where nothing else is computed of what they wrote.

    Args:
      writes: from `alike_writes`.
      made: set of the tower's ops.
      results: list of what it handed out, and put into collections.
    """
    needed, ends = ancestors(results, within=made), set(map(op_of, results))
    writes = {op: variables for op, variables in writes.items() if op in needed}
    of_all = writes_of(needed)
    computed = {op: _computed_of(op, variables, needed) for op, variables in writes.items()
                if control_flow_of(op) is not control_flow_now(op.graph) and op.type not in CALLS}
    left, found = set(), {op for op, ops in computed.items() if ends.isdisjoint(ops)}
    while found != left:  # all writes of a variable, or none
        left = found
        kept = {variable for op, variables in of_all.items() if op not in left for variable in variables}
        found = {op for op in left if kept.isdisjoint(writes[op]) and all(
            other in left for other in computed[op] if other in of_all)}
    inside = left.union(*[computed[op] for op in left])
    for op in inside:
        for waiting in waiting_for(op):
            if waiting in made and waiting not in inside:
                wait_only_for(waiting, [earlier for earlier in waiting.control_inputs if earlier not in inside])


def _computed_of(op, variables, needed):
    """Returns what is computed of what a write hands out, or of what is read of its variables behind it, a set."""
    behind = descendants([op], within=needed)
    found = set()
    stack = [op] + [taker for variable in variables for taker in takers_of(variable) if taker in behind]
    while stack:
        each = stack.pop()
        if each in needed and each not in found:
            found.add(each)
            stack.extend(consumer for tensor in each.outputs for consumer in tensor.consumers())
    return found - {op}
