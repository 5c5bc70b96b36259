"""The functions that ops call, as branches and loops of control flow 2 are: their ops, what they take, and what they return."""
from typing import Any, NamedTuple

from towers.graph.op_types import BODIES
from towers.graph.private import called_graph
from towers.graph.walk import ancestors

__all__ = ["Bodies", "Body", "is_stateful"]


class Body(NamedTuple):
    """A function that an op calls.

    Attributes:
      inputs, outputs: lists of tensors of the function's graph.
      ops: set of its operations that outputs are computed of, or that have effects.
    """
    inputs: Any
    outputs: Any
    ops: Any


class Bodies:
    """The functions that ops call, each op's its own.

    Args:
      are_shared: whether ops that call one function have the same operations.
    """

    def __init__(self, are_shared=False):
        self._are_shared, self._found, self._taken = are_shared, {}, set()

    def of(self, op):
        """Returns the functions that an op calls, a list of `Body`: branches in order; of a loop its condition, and its turn."""
        if op not in self._found:
            self._found[op] = [self._body(op, name) for name in _names(op)]
        return self._found[op]

    def _body(self, op, name):
        graph = called_graph(op, name)
        if graph in self._taken and not self._are_shared:
            graph = called_graph(op, name, anew=True)
        self._taken.add(graph)
        ends = list(graph.outputs) + list(getattr(graph, "control_outputs", ())) + [
            each for each in graph.get_operations() if is_stateful(each)]
        return Body(list(graph.inputs), list(graph.outputs), ancestors(ends) | {tensor.op for tensor in graph.inputs})


def is_stateful(op):
    """Tells whether an op has state, effects, or draws."""
    return op.op_def is None or op.op_def.is_stateful


def _names(op):
    found = []
    for attribute in BODIES[op.type]:
        value = op.get_attr(attribute)
        found += [each.name for each in (value if isinstance(value, (list, tuple)) else [value])]
    return found
