"""Numbers of a plain tower's own rows: how they are made, and what takes rows by them."""
import dataclasses
from typing import Any, NamedTuple, Optional

import numpy as np

from towers.graph.op_types import ADDS
from towers.graph.static_values import step_along
from towers.graph.walk import computes_the_same
from towers.sharding.nodes import Numbered
from towers.sharding.placements import BATCH, Additive, Blocks, Replicate, RowNumbers, Rows, Shard, Size
from towers.sharding.rules.movement.gathers import where
from towers.sharding.rules.pointwise import along_rows
from towers.sharding.rules.table import RULES

__all__ = ["by_numbers", "chosen", "columns", "counted", "of_own_rows", "times_of_numbers"]


_COMPUTED_OF_SIZES = ADDS.union(["FloorDiv", "FloorMod", "Sub"])  # numbers that are no sizes any more


class _InBlocks(NamedTuple):
    """Rows that stand in blocks, as steps of examples do, time first; those that a mask chooses stand in some blocks too.

    Attributes:
      of, outer, times: see `Blocks`.
    """
    of: Any
    outer: Optional[int]
    times: Optional[int]

    @property
    def name(self):
        """str, as of `Rows`."""
        return self.of.name


def chosen(node):
    """Where a mask of rows is true, of such that stand in blocks too."""
    value, placement = node.inputs[0], node.inputs[0].placement
    if not isinstance(placement, Blocks) or placement.axis:
        return where(node)
    of = Additive(1, _InBlocks(placement.rows, placement.outer, placement.times))
    name = next((op.name for op, _ in node.context.placements if op.type == node.type and op is not node.op and computes_the_same(
        op.inputs[0], value.tensor)), node.op.name)  # tf.boolean_mask looks anew each time
    return node.decide(RowNumbers(0, Rows(name), 1, of, (value.tensor, 0), None if value.rank == 1 else 0))


def _take_for_numbers(node):
    """Lets constants that count the tower's examples, 0, 1, 2 or 0, 6, 12, be numbers of rows where they lie beside rows."""
    rows = [value for value in node.inputs if type(value.placement) is Shard]
    if not rows or rows[0].placement.rows != BATCH or rows[0].placement.times != 1 or not rows[0].dtype.is_integer:
        return
    behind = rows[0].rank - rows[0].placement.axis
    for value in node.inputs:
        known = value.const()
        if known is None or known.ndim < behind or known.shape[-behind] != node.context.num_rows:
            continue
        step = step_along(known, known.ndim - behind)
        if step:
            value.placement = RowNumbers(known.ndim - behind, BATCH, 1, Additive(step, BATCH), None)


def columns(node):
    """Numbers of rows beside other columns, all of them a constant perhaps."""
    _take_for_numbers(node)
    return RULES[node.type].function(node)


def of_own_rows(node):
    """What is added to numbers of rows numbers rows of the same example: `range(n) * length + place`."""
    _take_for_numbers(node)
    numbers = node.of(RowNumbers)
    if len(numbers) != 1 or not node.outputs[0].dtype.is_integer or node.type == "Sub" and numbers[0] or not node.all(
            RowNumbers, Shard, Replicate):
        return RULES[node.type].function(node)
    placement, other = node.inputs[numbers[0]].placement, node.inputs[1 - numbers[0]]
    (wants, found), added = along_rows(node), other.const()
    if added is not None and placement.offset is not None:
        added = placement.offset + (-added if node.type == "Sub" else added)
        is_own = not placement.of.times or np.min(added) >= 0 and np.max(added) < placement.spacing
    else:
        is_own = isinstance(other.placement, Shard) or placement.offset is None or not placement.of.times
    if placement.column is not None or wants != {numbers[0]: Numbered()} or not is_own:
        return RULES[node.type].function(node)
    return node.decide(dataclasses.replace(placement, axis=found.axis, times=found.times, offset=None))


def times_of_numbers(node):
    """Numbers of rows times how many an example has, though nobody knows how many these are."""
    k = next(iter(node.of(RowNumbers)), None)
    if k is None or not node.outputs[0].dtype.is_integer:
        return RULES[node.type].function(node)
    numbers, factor = node.inputs[k].placement, node.inputs[1 - k]
    is_size = factor.tensor.op.type not in _COMPUTED_OF_SIZES
    if not isinstance(factor.placement, Replicate) or factor.rank or factor.const() is not None or not is_size:
        return RULES[node.type].function(node)
    return node.decide(dataclasses.replace(numbers, of=numbers.of._replace(times=None)))


def counted(node):
    """Numbers of as many rows as there are, though nobody knows how many an example has."""
    start, limit, step = node.inputs
    of = limit.elements()[()] if isinstance(limit.placement, Size) else None
    if isinstance(of, Additive) and of.times is None and start.const() == 0 and step.const() == 1:
        return node.decide(RowNumbers(0, of.rows, None, of, (limit.tensor, None)))
    return RULES["Range"].function(node)


def by_numbers(node):
    """Rows taken by numbers of a tower's own, where it is not known how many an example has."""
    rows, numbers = (value.placement for value in node.inputs[:2])
    if isinstance(numbers, RowNumbers) and isinstance(rows, Blocks) and not rows.axis and numbers.column is None and (
            numbers.of.rows == _InBlocks(rows.rows, rows.outer, rows.times)):
        return node.decide(Blocks(numbers.axis, None, numbers.rows, numbers.times))
    if isinstance(numbers, RowNumbers) and isinstance(rows, Shard) and numbers.of.rows == rows.rows and (
            None in (numbers.of.times, rows.times)):
        node.inputs[0].placement = dataclasses.replace(rows, times=rows.times or numbers.of.times or 1)
        node.inputs[1].placement = dataclasses.replace(
            numbers, of=numbers.of._replace(times=node.inputs[0].placement.times))
    return RULES[node.type].function(node)
