"""What is made within a branch, loop or function, and what towers have to meet about outside of it, before."""
import dataclasses
from typing import Any, Dict, List, NamedTuple

from towers.graph.op_types import BODIES
from towers.graph.walk import end_of, writes_of
from towers.sharding.bodies import is_stateful
from towers.sharding.nodes import AsPartial, OwnRows, Replicated, ShapeOf
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, Partial, PartialMean, Replicate, RowNumbers, Shard,
                                        Size, entries_of)

__all__ = ["Carried", "Inner", "KnownWithin", "READS", "is_counted", "is_made_within", "is_of_batch", "outside_of"]

READS = frozenset(["ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarHandleOp"])


class KnownWithin(Exception):
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


def is_of_batch(placement):
    return isinstance(placement, (Shard, Blocks)) and placement.rows == BATCH and entries_of(placement) is not None


def is_made_within(inner, tensor, want):
    """Tells whether a conversion can be made within a branch or loop, as no towers meet for it."""
    placement = inner.placement(tensor)
    if isinstance(want, (Replicated, ShapeOf)):
        return isinstance(placement, Replicate) or _sizes_taken(inner, tensor) is not None
    if isinstance(want, AsPartial):
        return isinstance(placement, (Partial, Replicate)) or isinstance(placement, PartialMean) and placement.rows == BATCH
    if isinstance(want, OwnRows):
        return isinstance(placement, Replicate) and is_counted(inner, want)
    return isinstance(placement, RowNumbers) and placement.of.rows == BATCH and placement.of.times is not None


def is_counted(inner, rows):
    """Tells whether a tower's own rows are told by how many examples it has."""
    if isinstance(rows.like, Additive):
        return rows.like.rows == BATCH and rows.like.times is not None
    return is_of_batch(inner.placement(rows.like[0]))


def _sizes_taken(inner, tensor):
    """Returns what a size that is made within, as the whole batch's, is computed of, besides how many examples there are.

    Returns:
      A list of sizes that the function takes, which are made whole outside. None where it is computed of something else.
    """
    placement, op = inner.placement(tensor), tensor.op
    if not isinstance(placement, Size):
        return [] if isinstance(placement, Replicate) else None
    if op.type == "Const" or all(element is not COMPUTED and (not isinstance(element, Additive) or (
            element.rows == BATCH and element.times is not None)) for element in placement.elements):
        return []
    taken = {end_of(each): k for k, each in enumerate(inner.body.inputs)}.get(end_of(tensor))
    if taken is not None:
        return None if taken in inner.varying else [tensor]
    if op.type in ("Shape", "Size", "ShapeN") or not op.inputs:
        return None
    found = [_sizes_taken(inner, source) for source in op.inputs]
    return None if None in found else [each for sizes in found for each in sizes]


def _needed_outside(inner):
    """Yields the tensors of a function that are needed outside of it, for towers to meet about them."""
    for op, decision in inner.plan.decisions.items():
        for k, want in decision.wants.items():
            yield from _wanted_outside(inner, op.inputs[k], want)
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
        yield from _wanted_outside(inner, inner.body.outputs[number], want)


def _wanted_outside(inner, tensor, want):
    """Returns what is needed outside for a tensor as it is wanted, a list."""
    if not is_made_within(inner, tensor, want):
        return [tensor]
    return _sizes_taken(inner, tensor) or [] if isinstance(want, (Replicated, ShapeOf)) else []


def outside_of(inner, bodies):
    """Returns the numbers of the inputs that are needed outside of a function, a set; `KnownWithin` where something else is."""
    numbers = {end_of(tensor): k for k, tensor in enumerate(inner.body.inputs)}
    found, seen, stack = set(), set(), list(_needed_outside(inner))
    writes = _writes(inner.body, bodies)
    while stack:
        tensor = stack.pop()
        k = numbers.get(end_of(tensor))
        if k is not None:
            if k in inner.varying:
                raise KnownWithin(tensor.op)
            found.add(k)
        elif tensor.op not in seen:
            seen.add(tensor.op)
            if not _is_repeatable(tensor.op, bodies, writes):
                raise KnownWithin(tensor.op)
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
