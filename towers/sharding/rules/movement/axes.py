"""Ops that move values: they are linear in what they move, so a sum's parts stay parts of it."""
import dataclasses

import numpy as np

from towers.sharding.nodes import ShapeOf, Unfit
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, OneRow, Replicate, RowNumbers, Shard, Size, moved,
                                        size_of)
from towers.sharding.rules.arithmetic import is_of_size
from towers.sharding.rules.pointwise import along_rows, jointly_linear
from towers.sharding.rules.table import MOVES, SUMS, rule

__all__ = ["first_additive", "in_blocks", "kept", "known_product", "shape_wanted"]

ROWS = (Shard, Blocks, RowNumbers)


def in_blocks(placement, axis, outer, times):
    """Returns the placement of rows that stand in `outer` blocks along an axis, `times` entries for each in a block."""
    if outer is None:
        return dataclasses.replace(placement, axis=axis, times=times)
    return Shard(axis, placement.rows, times) if outer == 1 else Blocks(axis, outer, placement.rows, times)


def known_product(sizes):
    """Returns the product of sizes, and whether some of them are not known."""
    known = [size for size in sizes if size is not None]
    return int(np.prod(known, dtype=np.int64)), len(known) < len(sizes)


def shape_wanted(node, k, axis):
    """Returns wants by which a shape is the tower's own along an axis, and the whole batch's along all others, a dict."""
    elements = node.inputs[k].elements()
    if isinstance(node.inputs[k].placement, Replicate):
        return {}
    others = [element for j, element in enumerate(elements) if j != axis]
    if not any(map(is_of_size, others)) and elements[axis] is not COMPUTED:
        return {}
    return {k: ShapeOf(own=(axis,))}


@rule("Transpose ConjugateTranspose", ROWS + (Size,) + SUMS, does=MOVES)
def transpose(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS):
        return node.decide(placement, node.wanted([1]))
    order = node.inputs[1].const()
    if isinstance(placement, Size) and order is not None:
        return node.decide(size_of(np.transpose(placement.array(), order)))
    if order is None or isinstance(placement, RowNumbers) and placement.column is not None:
        raise Unfit()
    return node.decide(moved(placement, list(order).index(placement.axis)))


@rule("ExpandDims", ROWS + (Size,) + SUMS, does=MOVES)
def expand_dims(node):
    placement, at = node.inputs[0].placement, node.inputs[1].const()
    if isinstance(placement, SUMS):
        return node.decide(placement, node.wanted([1]))
    if at is None:
        raise Unfit()
    at = int(np.reshape(at, -1)[0]) % (node.inputs[0].rank + 1)
    if isinstance(placement, Size):
        return node.decide(size_of(np.expand_dims(placement.array(), at)))
    if isinstance(placement, RowNumbers) and placement.column is not None and at == node.inputs[0].rank:
        raise Unfit()
    return node.decide(moved(placement, placement.axis + (at <= placement.axis)))


@rule("Squeeze", ROWS + (Size,) + SUMS, does=MOVES)
def squeeze(node):
    value = node.inputs[0]
    placement = value.placement
    if isinstance(placement, SUMS):
        return node.decide(placement)
    asked = [axis % value.rank for axis in node.attr("squeeze_dims")]
    if isinstance(placement, Size):
        return node.decide(size_of(np.squeeze(placement.array(), tuple(asked) if asked else None)))
    gone = asked or [axis for axis, size in enumerate(value.whole) if size == 1]
    if placement.axis in gone or not asked and None in value.whole[:placement.axis]:
        raise Unfit()
    if isinstance(placement, RowNumbers) and placement.column is not None and value.rank - 1 in gone:
        raise Unfit()
    return node.decide(moved(placement, placement.axis - sum(axis < placement.axis for axis in gone)))


@rule("Concat ConcatV2", ROWS + (Size,) + SUMS, does=MOVES)
def concat(node):
    at = 0 if node.type == "Concat" else len(node.inputs) - 1
    numbers = [k for k in range(len(node.inputs)) if k != at]
    axis = node.inputs[at].const()
    if axis is None:
        raise Unfit()
    return _joined(node, numbers, int(axis), lambda arrays, axis: np.concatenate(arrays, axis))


@rule("Pack", ROWS + (Size,) + SUMS, does=MOVES)
def pack(node):
    numbers = list(range(len(node.inputs)))
    axis = node.attr("axis") % node.outputs[0].rank
    if node.of(*ROWS):
        columns = _columns(node, axis, numbers)
        if columns is not None:
            return node.decide(columns)
        alike = {value.placement for value in node.inputs}
        first = node.inputs[0].placement
        if len(alike) == 1 and isinstance(first, RowNumbers) and first.column is None:
            return node.decide(moved(first, first.axis + (axis <= first.axis)))
        wants, placement = along_rows(node, node.inputs[0].rank, dict.fromkeys(numbers, 0))
        return node.decide(moved(placement, placement.axis + (axis <= placement.axis)), wants)
    return _joined(node, numbers, axis, lambda arrays, axis: np.stack(arrays, axis))


def _columns(node, axis, columns):
    """Returns the placement of columns that are put together, one of which numbers rows; None where they are something else.

    Args:
      node: `Node`.
      axis: int, along which they are put together.
      columns: list of int, the inputs.
    """
    found = [node.inputs[k].placement for k in columns]
    numbers = [k for k, placement in enumerate(found) if isinstance(placement, RowNumbers)]
    are_rows = all(isinstance(placement, (Shard, RowNumbers)) for placement in found)
    if len(numbers) != 1 or axis != node.outputs[0].rank - 1 or not are_rows or len({each.axis for each in found}) != 1:
        return None
    placement = found[numbers[0]]
    if placement.column is not None:
        return None
    if node.type == "Pack":
        return dataclasses.replace(placement, column=numbers[0])
    sizes = [node.inputs[k].dims[-1] for k in columns[:numbers[0] + 1]]
    return None if None in sizes or sizes[-1] != 1 else dataclasses.replace(placement, column=sum(sizes[:-1]))


def _joined(node, numbers, axis, of_arrays):
    others = node.wanted(k for k in range(len(node.inputs)) if k not in numbers)
    if all(isinstance(node.inputs[k].placement, (Size, Replicate)) for k in numbers):
        arrays = [node.inputs[k].elements() for k in numbers]
        if any(array is None for array in arrays):
            raise Unfit()
        return node.decide(size_of(of_arrays(arrays, axis)), others)
    if any(isinstance(node.inputs[k].placement, ROWS) for k in numbers):
        rank = node.inputs[numbers[0]].rank
        found = {node.inputs[k].placement for k in numbers}
        first = node.inputs[numbers[0]].placement
        if any(isinstance(placement, ROWS) and axis % rank == placement.axis for placement in found):
            times = {getattr(value.placement, "times", None) for value in (node.inputs[k] for k in numbers)}
            if len(found) > 1 or isinstance(first, RowNumbers) or len(times) > 1 or None in times:
                raise Unfit()  # other rows stand between the towers' own
            if getattr(first, "outer", 1) is None:
                raise Unfit()
            return node.decide(in_blocks(first, first.axis, len(numbers) * getattr(first, "outer", 1), first.times), others)
        if len(found) == 1 and not isinstance(first, RowNumbers):
            return node.decide(first, others)
        columns = _columns(node, axis % rank, numbers)
        if columns is not None:
            return node.decide(columns, others)
        wants, placement = along_rows(node, rank, {k: 0 if k in numbers else rank for k in range(len(node.inputs))})
        return node.decide(placement, {**wants, **others})
    wants, placement = jointly_linear(node, numbers)
    return node.decide(placement, wants)


@rule("Unpack", ROWS + (Size,) + SUMS, does=MOVES)
def unpack(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS):
        return node.decide(placement)
    axis = node.attr("axis") % node.inputs[0].rank
    if isinstance(placement, Size):
        return node.decide([size_of(kept(element)) for element in np.moveaxis(placement.array(), axis, 0)])
    if isinstance(placement, RowNumbers) and placement.column is not None:
        if axis != node.inputs[0].rank - 1:
            raise Unfit()
        plain = dataclasses.replace(placement, column=None)
        return node.decide([plain if k == placement.column else Shard(placement.axis, placement.rows, placement.times)
                            for k in range(len(node.outputs))])
    if axis == placement.axis:
        return node.decide(_each_row(node, len(node.outputs)))
    return node.decide(moved(placement, placement.axis - (axis < placement.axis)))


def _each_row(node, count):
    """Returns the placements of the tower's examples taken apart, a list."""
    placement = next(value.placement for value in node.inputs if not isinstance(value.placement, Replicate))
    if type(placement) is not Shard or placement.rows != BATCH or placement.times != 1 or not (
            node.context.takes_apart(node.op, count, placement.axis)):
        raise Unfit()
    return [OneRow(number, count) for number in range(count)]


def kept(element):
    """Returns an element of an array of objects as an array: a named tuple would become one of its fields."""
    if isinstance(element, np.ndarray):
        return element
    found = np.empty((), object)
    found[()] = element
    return found


@rule("Split SplitV", ROWS + (Size,) + SUMS, does=MOVES)
def split(node):
    data, at = (1, 0) if node.type == "Split" else (0, 2)
    others = node.wanted(k for k in range(len(node.inputs)) if k != data)
    placement, axis = node.inputs[data].placement, node.inputs[at].const()
    if isinstance(placement, SUMS):
        return node.decide(placement, others)
    if axis is None or not isinstance(placement, ROWS):
        raise Unfit()
    parts = node.attr("num_split")
    if int(axis) % node.inputs[data].rank == placement.axis:
        outer = getattr(placement, "outer", 1)
        if node.type == "Split" and outer == 1:
            return node.decide(_each_row(node, parts), others)
        if node.type == "SplitV" or outer is None or outer % parts:
            raise Unfit()
        return node.decide(in_blocks(placement, placement.axis, outer // parts, placement.times), others)
    if isinstance(placement, RowNumbers) and placement.column is not None:
        raise Unfit()
    return node.decide(placement, others)


def first_additive(elements):
    """Returns the first axis whose size is a number of rows, None where there is none; `Unfit` where a size is computed."""
    if elements is None or any(element is COMPUTED for element in elements):
        raise Unfit()
    return next((axis for axis, element in enumerate(elements) if isinstance(element, Additive)), None)


@rule("Tile", ROWS + (Size,) + SUMS, does=MOVES)
def tile(node):
    value, times = node.inputs[0], node.inputs[1].elements()
    placement = value.placement
    if isinstance(placement, SUMS) and isinstance(node.inputs[1].placement, Replicate):
        return node.decide(placement)
    if isinstance(placement, Size) or times is None:
        raise Unfit()
    if isinstance(placement, ROWS):
        if isinstance(placement, RowNumbers) and placement.column is not None:
            raise Unfit()
        number = times[placement.axis]
        if not isinstance(number, int):
            raise Unfit()
        if number == 1:
            return node.decide(placement, shape_wanted(node, 1, placement.axis))
        if isinstance(placement, RowNumbers) or number < 1 or getattr(placement, "outer", 1) is None:
            raise Unfit()
        return node.decide(in_blocks(placement, placement.axis, number * getattr(placement, "outer", 1), placement.times),
                           shape_wanted(node, 1, placement.axis))
    axis = first_additive(times)
    if axis is None:
        raise Unfit()
    size = value.whole[axis]
    wants = {**node.wanted([0]), **shape_wanted(node, 1, axis)}
    return node.decide(Shard(axis, times[axis].rows, None if None in (size, times[axis].times) else size * times[axis].times),
                       wants)


@rule("BroadcastTo", ROWS + (Size,) + SUMS, does=MOVES)
def broadcast_to(node):
    value, shape = node.inputs[0], node.inputs[1].elements()
    placement = value.placement
    if isinstance(placement, SUMS) and isinstance(node.inputs[1].placement, Replicate):
        return node.decide(placement)
    if isinstance(placement, Size) or shape is None:
        raise Unfit()
    start = len(shape) - value.rank
    if isinstance(placement, ROWS):
        if isinstance(placement, RowNumbers) and placement.column is not None:
            raise Unfit()
        axis = placement.axis + start
        return node.decide(moved(placement, axis), shape_wanted(node, 1, axis))
    axis = first_additive(shape)
    if axis is None or axis >= start and value.whole[axis - start] != 1:
        raise Unfit()
    return node.decide(Shard(axis, shape[axis].rows, shape[axis].times), {**node.wanted([0]), **shape_wanted(node, 1, axis)})


@rule("Pad PadV2 MirrorPad", (Shard, Blocks) + SUMS, does=MOVES)
def pad(node):
    placement, paddings = node.inputs[0].placement, node.inputs[1].const()
    if isinstance(placement, SUMS):
        if node.type == "PadV2" and np.any(node.inputs[2].const() != 0):
            raise Unfit()
        return node.decide(placement, node.wanted(range(1, len(node.inputs))))
    if not isinstance(placement, (Shard, Blocks)) or paddings is None or np.any(paddings[placement.axis]):
        raise Unfit()
    return node.decide(placement, node.wanted(range(1, len(node.inputs))))


@rule("OneHot", ROWS, does=MOVES)
def one_hot(node):
    placement = node.inputs[0].placement
    if not isinstance(placement, ROWS):
        raise Unfit()
    at = node.attr("axis") % node.outputs[0].rank
    wants, found = along_rows(node, node.inputs[0].rank,
                              {k: 0 if k == 0 else node.inputs[0].rank for k in range(len(node.inputs))})
    return node.decide(moved(found, found.axis + (at <= found.axis)), wants)
