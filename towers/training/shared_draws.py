"""Copies of several steps, to be run in turn, that draw the random numbers which the steps would draw in turn.

A random op goes on from what it drew last, and a copy of it from a beginning of its own. So an op that several steps depend on,
noise that a discriminator and a generator take say, is copied once for all of them, with what it depends on.
"""
from typing import Any, NamedTuple

from towers.graph.copies import GraphCopy
from towers.graph.draws import drawing
from towers.graph.private import control_flow_of
from towers.graph.walk import ancestors

__all__ = ["StepCopies", "copies_of_steps"]


class StepCopies(NamedTuple):
    """Copies of steps.

    Attributes:
      shared: `GraphCopy` of what is to run in each step, or None.
      tensors: list of the tensors among the ends of `shared`, its first ones.
      of_steps: list of `GraphCopy`, of all else of each step.
    """
    shared: Any
    tensors: list
    of_steps: list

    def make_shared(self):
        """Copies what runs in each step; returns what `GraphCopy.make` is given, a dict, and a list of all that was made."""
        made = self.shared.make("all_steps") if self.shared is not None else []
        return dict(zip([tensor.name for tensor in self.tensors], made)), made


def copies_of_steps(ends):
    """Prepares copies of steps.

    Args:
      ends: list over steps of lists of tensors and operations, see `GraphCopy`.

    Returns:
      `StepCopies`.

    Raises:
      ValueError: for a random op that some steps share and others do not, or that stands in a tf.cond or tf.while_loop.
    """
    alone = [GraphCopy(of_step) for of_step in ends]
    if len(alone) == 1:
        return StepCopies(None, [], alone)
    of_steps = [set(copy.ops) for copy in alone]
    counts = {op: sum(op in of_step for of_step in of_steps) for op in alone[0].graph.get_operations()}
    draws = drawing([op for op, count in counts.items() if count > 1])
    if not draws:
        return StepCopies(None, [], alone)
    for op in draws:
        if counts[op] < len(alone):
            raise ValueError("The random op %r belongs to %d of the %d steps of towers.repeat, which can't go on from each "
                             "other's numbers then. Let each step make random numbers of its own, or all steps take it."
                             % (op.name, counts[op], len(alone)))
    shared = ancestors(draws, within=of_steps[0])
    within = [op for op in alone[0].ops if op in shared and control_flow_of(op) is not None]
    if within:
        raise ValueError("The random op %r belongs to several steps of towers.repeat and depends on %r in a tf.cond or "
                         "tf.while_loop, which is not shared. Let each step make random numbers of its own."
                         % (draws[0].name, within[0].name))
    taken = [tensor for copy in alone for op in copy.ops if op not in shared for tensor in op.inputs]
    taken += [end for of_step in ends for end in of_step if getattr(end, "op", None) is not None]
    tensors = list({tensor.name: tensor for tensor in taken if tensor.op in shared}.values())
    runs = [op for op in alone[0].ops if op in shared]
    return StepCopies(GraphCopy(tensors + runs), tensors, [GraphCopy(of_step, shared) for of_step in ends])
