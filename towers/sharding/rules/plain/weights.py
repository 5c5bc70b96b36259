"""A tower's "weight", by which the towers' losses are averaged: the number of what its loss is a mean over."""
import numpy as np

from towers.graph.op_types import ADDS, OF_SHAPES, VARIABLES
from towers.graph.static_values import static_value
from towers.graph.walk import computes_the_same, end_of

__all__ = ["SMALL", "Weight"]

SMALL = .001  # what is added to a number to keep it from 0


class Weight:
    """What a tower returns as "weight".

    Args:
      tensor: the weight; None where there is none.
      graph: the tower's, not a function's.
      given: the ends of what the model function takes, a set.
      made: set of the tower's operations.
      from_outside: a function of a tensor that returns what a function was given for it; others as they are.

    Attributes:
      leaves: what the weight is computed of, a set of ends; None where there is no weight.
    """

    def __init__(self, tensor, graph, given, made, from_outside):
        self._tensor, self._graph, self._given, self._made, self._from_outside = tensor, graph, given, made, from_outside
        self._ops, self.leaves = (set(), None) if tensor is None else self._behind(tensor.op)

    def leaves_of(self, op):
        """Returns what of the batch the values that an op computes are of, a set of ends; None among them is a variable."""
        return self._behind(op)[1]

    def counts(self, tensor):
        """Tells whether a number is of what the weight is of, and nothing is added to the one that the other has not."""
        ops, leaves = self._behind(tensor.op)
        if not self.leaves or leaves != self.leaves:
            return False
        if computes_the_same(self._tensor, tensor):
            return not any(_adds(op) for op in self._ops if op.outputs[0].shape.rank == 0)
        return not any(map(_adds, self._ops ^ ops))

    def _behind(self, op):
        """Returns the operations that an op computes its values of, a set with itself, and the leaves that these take."""
        found, leaves, stack = set(), set(), [op]
        while stack:
            each = stack.pop()
            if each in found or each.type in OF_SHAPES:
                continue
            found.add(each)
            for source in map(self._from_outside, each.inputs):
                is_inner = source.op.graph is not self._graph
                if end_of(source) in self._given or is_inner and source.op.type == "Placeholder":
                    leaves.add(end_of(source))
                elif source.op.type in VARIABLES:
                    leaves.add(None)
                elif is_inner or source.op in self._made:
                    stack.append(source.op)
        return found, leaves


def _adds(op):
    """Tells whether an op makes another number of one: by what it adds, or takes for the least there is."""
    numbers = [static_value(source) for source in op.inputs]
    known = [number for number in numbers if number is not None and np.asarray(number).dtype.kind in "fiu"]
    if op.type in ADDS or op.type == "Sub":
        return any(np.any(np.abs(number) > SMALL) for number in known)
    return op.type == "Maximum" and any(np.any(number > 1) for number in known)
