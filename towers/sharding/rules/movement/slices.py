"""Rows that are taken by their place, and what is put back there: slices, and the gradient of slices."""
import dataclasses

import tensorflow.compat.v1 as tf

from towers.graph.op_types import SAME_NUMBERS
from towers.graph.static_values import static_value
from towers.graph.walk import end_of
from towers.sharding.nodes import ShapeOf, Unfit
from towers.sharding.placements import (Additive, Blocks, InTurn, OneRow, Replicate, RowNumbers, Shard, Size, entries_of, moved,
                                        size_of)
from towers.sharding.rules.arithmetic import is_of_size
from towers.sharding.rules.loops.single_rows import row_taken
from towers.sharding.rules.loops.turns import takes_its_row
from towers.sharding.rules.movement.axes import in_blocks, kept
from towers.sharding.rules.table import SUMS, rule

__all__ = ["takes_by_place", "takes_equal_parts"]

ROWS = (Shard, Blocks, RowNumbers)


def index_of(node):
    """Returns the index of a StridedSlice: a list of int, None for a new axis, Ellipsis, and slices.

    A slice holds numbers and elements of `Size`, and "computed" where neither is known.
    """
    count = node.inputs[1].whole[0]
    if count is None:
        raise Unfit()
    return _index(node.op, count, *[value.elements() for value in node.inputs[1:4]])


def _index(op, count, begin, end, strides):
    masks = {name: op.get_attr(name + "_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def has(name, i):
        return masks[name] >> i & 1

    def of(elements, i):
        element = None if elements is None else elements[i]
        return "computed" if element is None else element
    found = []
    for i in range(count):
        if has("ellipsis", i):
            found.append(Ellipsis)
        elif has("new_axis", i):
            found.append(None)
        elif has("shrink_axis", i):
            found.append(of(begin, i))
        else:
            found.append(slice(None if has("begin", i) else of(begin, i), None if has("end", i) else of(end, i), of(strides, i)))
    return found


def takes_by_place(op):
    """Tells whether an op takes parts of something by their place, which is known while the graph is built."""
    return op.type in ("Split", "SplitV", "Unpack") or op.type in ("Slice", "StridedSlice") and all(
        static_value(source) is not None for source in list(op.inputs)[1:3])


def takes_equal_parts(op, axis, placements, sizes):
    """Tells whether an op takes one of so many parts of an axis, of one size each: a half, every third, or by its own size.

    Args:
      op: the operation.
      axis: int, of its first input.
      placements: dict from (op, number of its output) to `Placement`.
      sizes: the examples of the tower, and a list of all towers', which have as many parts, or None.
    """
    shape, values = op.inputs[0].shape, [static_value(source) for source in list(op.inputs)[1:]]
    if op.type == "SplitV":
        return values[0] is not None and len(set(values[0].tolist())) == 1
    if op.type not in ("Slice", "StridedSlice"):
        return takes_by_place(op)
    bounds = list(op.inputs)[1:3]
    if any(isinstance(placements.get(end_of(bound)), Size) for bound in bounds):
        return all(_is_part_of_size(bound, placements) for bound in bounds)
    if shape.rank is None or any(value is None for value in values):
        return False
    begin, end, *strides = (value.tolist() for value in values)
    if op.type == "Slice":
        item = slice(begin[axis], None if end[axis] < 0 else begin[axis] + end[axis], 1)
    else:
        items = [item for item, _ in _items(_index(op, len(begin), begin, end, strides[0]), shape.rank) if item is not None]
        item = items[axis]
    rows = tf.dimension_value(shape[axis])
    if not isinstance(item, slice) or item.step < 0:
        return rows == 1
    step = item.step
    if rows is None:
        return item.stop is None and 0 <= (item.start or 0) < step
    taken = range(rows)[item]
    count = len(taken)
    if not count or rows % count or not (taken[0] < step == rows // count if step > 1 else taken[0] % count == 0):
        return False
    own, of_all = sizes
    return of_all is None or not any(count * size % own for size in of_all)


def _is_part_of_size(tensor, placements):
    """Tells whether a bound is a number of rows or a quotient of it, or has such and constants in it."""
    while tensor.op.type in SAME_NUMBERS:
        tensor = tensor.op.inputs[0]
    placement = placements.get(end_of(tensor))
    if tensor.op.type == "Pack":
        return all(_is_part_of_size(source, placements) for source in tensor.op.inputs)
    return not isinstance(placement, Size) or tensor.op.type == "FloorDiv" or all(
        isinstance(element, (Additive, int, type(None))) for element in placement.elements)


@rule("StridedSlice", ROWS + (InTurn, OneRow, Size) + SUMS)
def strided_slice(node):
    value = node.inputs[0]
    if node.of(OneRow):
        return _one_row(node)
    if takes_its_row(node, 1, 2):
        return node.decide(InTurn())
    if node.of(InTurn):
        raise Unfit()
    placement, rank = value.placement, value.rank
    if isinstance(placement, SUMS):
        return node.decide(placement, node.wanted([1, 2, 3]))
    index = index_of(node)
    if isinstance(placement, Size):
        return node.decide(size_of(kept(placement.array()[tuple(map(_plain, index))])))
    if not isinstance(placement, ROWS):
        raise Unfit()
    axis, source, found = 0, 0, None
    for item, position in _items(index, rank):
        if item is not None:
            if source == placement.axis:
                own = () if position is None else (position,)
                found = _rows_taken(placement, item, axis)
            elif isinstance(placement, RowNumbers) and placement.column is not None and source == rank - 1:
                return _column_taken(node, placement, item)
            source += 1
        axis += item is None or isinstance(item, slice)
    if found is None:
        raise Unfit()
    return node.decide(found, _with_own(node, (1, 2, 3), own))


def _items(index, rank):
    """Returns pairs of the items of an index, one for each axis and new axis, and their numbers in the inputs, or None."""
    positions = list(range(len(index)))
    used = sum(item is not None and item is not Ellipsis for item in index)
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = list(index)
    index[at:at + 1] = positions[at:at + 1] = []
    index[at:at], positions[at:at] = [slice(None, None, 1)] * (rank - used), [None] * (rank - used)
    return list(zip(index, positions))


def _with_own(node, numbers, own):
    """Returns wants by which shapes and places are the whole batch's but for some elements, a dict."""
    wants = {}
    for k in numbers:
        elements = node.inputs[k].elements()
        if not isinstance(node.inputs[k].placement, Replicate) and any(
                is_of_size(element) for i, element in enumerate(elements) if i not in own):
            wants[k] = ShapeOf(own=own)
    return wants


def _column_taken(node, placement, item):
    if isinstance(item, slice) or not isinstance(item, int) or placement.axis != 0 or node.inputs[0].rank != 2:
        raise Unfit()
    if item % (node.inputs[0].whole[1] or item + 1) == placement.column:
        return node.decide(dataclasses.replace(placement, axis=0, column=None))
    return node.decide(Shard(0, placement.rows, placement.times))


def _plain(item):
    """Returns an item of an index as NumPy takes it; `Unfit` where a part of it is not known."""
    parts = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
    if any(part == "computed" or is_of_size(part) for part in parts):
        raise Unfit()
    return item


def _rows_taken(placement, item, axis):
    """Returns the placement of the rows that a slice takes: all, or whole blocks."""
    if not isinstance(item, slice) or item.step != 1:
        raise Unfit()
    outer = getattr(placement, "outer", 1)
    if outer is None:
        if item.start in (None, 0) and item.stop is None:
            return moved(placement, axis)
        raise Unfit()
    start = 0 if item.start is None else _blocks_until(placement, item.start)
    stop = outer if item.stop is None else _blocks_until(placement, item.stop)
    if start == 0 and stop == outer:
        return moved(placement, axis)
    if isinstance(placement, RowNumbers) or not 0 <= start < stop <= outer:
        raise Unfit()
    return in_blocks(placement, axis, stop - start, placement.times)


def _blocks_until(placement, element):
    if isinstance(element, int) and element == 0:
        return 0
    times = placement.times
    if isinstance(element, Additive) and element.rows == placement.rows and element.times and times and (
            element.times % times == 0):
        return element.times // times
    raise Unfit()


def _one_row(node):
    """Decides for an index that takes a single row by the number of its turn in a loop of Python's."""
    source = 0
    for item, position in _items(index_of(node), node.inputs[0].rank):
        if item is not None:
            if position is not None and source == getattr(node.inputs[0].placement, "axis", None) and not (
                    isinstance(item, slice) and item.step != 1):
                return row_taken(node, {1: (position, 0), 2: (position, 1)})
            source += 1
    raise Unfit()


@rule("Slice", (InTurn, OneRow) + ROWS + (Size,) + SUMS)
def slice_(node):
    placement = node.inputs[0].placement
    if node.of(OneRow):
        if not isinstance(placement, Shard):
            raise Unfit()
        return row_taken(node, {1: (placement.axis, 0), 2: (placement.axis, None)})
    if isinstance(placement, SUMS):
        return node.decide(placement, node.wanted([1, 2]))
    if takes_its_row(node, 1, 2):
        return node.decide(InTurn())
    if node.of(InTurn):
        raise Unfit()
    begin, size = node.inputs[1].elements(), node.inputs[2].elements()
    if isinstance(placement, Size):
        if begin is None or size is None or len(begin) != 1 or not isinstance(begin[0], int) or not isinstance(size[0], int):
            raise Unfit()
        return node.decide(size_of(placement.array()[begin[0]:begin[0] + size[0] if size[0] >= 0 else None]))
    if not isinstance(placement, ROWS) or begin is None or size is None:
        raise Unfit()
    axis = placement.axis
    if begin[axis] != 0 or isinstance(begin[axis], Additive):
        raise Unfit()
    stop = None if isinstance(size[axis], int) and size[axis] == -1 else size[axis]
    found = _rows_taken(placement, slice(None, stop, 1), axis)
    if isinstance(placement, RowNumbers) and placement.column is not None:
        raise Unfit()
    wants = {}
    for k, elements in ((1, begin), (2, size)):
        if any(is_of_size(element) for i, element in enumerate(elements) if i != axis):
            wants[k] = ShapeOf(own=(axis,))
    return node.decide(found, wants)


@rule("StridedSliceGrad", (Shard, Blocks, Size) + SUMS)
def slice_gradient(node):
    """What was sliced is as large as the shape says: where all rows were taken, they are the tower's own."""
    slope, placement, elements = node.inputs[4], node.inputs[4].placement, node.inputs[0].elements()
    if isinstance(placement, SUMS):
        return node.decide(placement, node.wanted([0, 1, 2, 3]))
    if not isinstance(placement, (Shard, Blocks)) or elements is None or slope.dims is None:
        raise Unfit()
    source, item, position = _source_of(node, placement.axis, len(elements))
    times = entries_of(placement)
    if elements[source] != Additive(times, placement.rows) or times is None or _rows_taken(
            placement, item, source) != moved(placement, source):
        raise Unfit()
    wants = _with_own(node, (1, 2, 3), () if position is None else (position,))
    wants.update(_with_own(node, (0,), (source,)))
    return node.decide(moved(placement, source), wants)


def _source_of(node, along, rank):
    """Returns the axis that becomes one of the slice, the item of the index, and its number in the inputs or None."""
    axis = source = 0
    for item, position in _items(index_of(node), rank):
        if axis == along and isinstance(item, slice):
            return source, item, position
        source += item is not None
        axis += item is None or isinstance(item, slice)
    raise Unfit()
