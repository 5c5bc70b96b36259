"""Reshapes: rows are kept, merged with the axes around them, or taken apart again."""
import dataclasses

import numpy as np

from towers.sharding.nodes import ShapeOf, Unfit
from towers.sharding.placements import BATCH, COMPUTED, Additive, Blocks, Replicate, RowNumbers, Shard, Size, moved, size_of
from towers.sharding.rules.arithmetic import is_of_size
from towers.sharding.rules.movement.axes import in_blocks, known_product
from towers.sharding.rules.reductions import axes_of_gradient
from towers.sharding.rules.table import MOVES, SUMS, rule

__all__ = []

ROWS = (Shard, Blocks, RowNumbers)


@rule("Reshape", ROWS + (Size,) + SUMS, does=MOVES)
def reshape(node):
    value, shape = node.inputs
    if isinstance(value.placement, SUMS):
        return node.decide(value.placement, node.wanted([1]))
    if isinstance(value.placement, Size):
        target = shape.const()
        if target is None:
            raise Unfit()
        return node.decide(size_of(value.placement.array().reshape([int(n) for n in target])))
    if not isinstance(value.placement, ROWS):
        raise Unfit()
    placement = value.placement
    if value.dims is None:
        return _rows_of_any_rank(node)
    if isinstance(placement, RowNumbers) and placement.column is not None:
        raise Unfit()
    out, elements = node.outputs[0], shape.elements()
    before, is_unknown = known_product(value.whole[:placement.axis])
    if out.whole is None:
        raise Unfit()
    if is_unknown or getattr(placement, "outer", 1) is None:
        return _of_unknown_blocks(node)
    before *= getattr(placement, "outer", 1)
    after, some_after = known_product(value.whole[placement.axis + 1:])
    if elements is not None and getattr(placement, "times", None) and not some_after:
        elements = _what_is_left(list(elements), before * placement.times * after, placement.rows)
    whole = [element if size is None and isinstance(element, int) and element >= 0 else size
             for size, element in zip(out.whole, elements if elements is not None else out.whole)]
    for axis in range(out.rank):
        first, is_unknown = known_product(whole[:axis])
        element = None if elements is None else elements[axis]
        if is_unknown or not first or first > before:
            break
        is_kept = out.dims[axis] is None and isinstance(element, int) and element >= 0
        is_alike = elements is not None and _is_alike(element, elements)
        if before % first or is_kept or is_alike or not (isinstance(element, Additive) or out.varies(axis)):
            continue
        outer = before // first
        times = _times(placement, element, outer, (after, some_after), known_product(whole[axis + 1:]),
                       node.context.is_only_asked)
        if isinstance(placement, RowNumbers):
            if outer != 1:
                raise Unfit()
            return node.decide(dataclasses.replace(placement, axis=axis, times=times), _target(node, elements, axis))
        return node.decide(in_blocks(placement, axis, outer, times), _target(node, elements, axis))
    raise Unfit()


def _is_alike(element, elements):
    """Tells whether an element of a shape is as long in all towers, or what numbers of rows leave: no axis of rows."""
    if element is None:
        return any(other is not None and (is_of_size(other) or other < 0) for other in elements)
    return isinstance(element, int) and element < 0 and any(isinstance(other, Additive) for other in elements)


def _what_is_left(elements, entries, rows):
    """Returns the elements of a shape with a number for a -1 in front of rows: `[-1, n, width]` of blocks of rows.

    Args:
      elements: list, as `Size` has them.
      entries: int, how many entries an example has.
      rows: `Rows`.
    """
    left = [k for k, element in enumerate(elements) if isinstance(element, int) and element < 0]
    of_rows = [element for element in elements if isinstance(element, Additive)]
    others = [element for element in elements if isinstance(element, int) and element >= 0]
    if len(left) != 1 or len(of_rows) != 1 or len(others) + 2 != len(elements) or of_rows[0].rows != rows or (
            elements.index(of_rows[0]) < left[0]):
        return elements
    known = int(np.prod(others, dtype=np.int64)) * (of_rows[0].times or 0)
    return elements if not known or entries % known else elements[:left[0]] + [entries // known] + elements[left[0] + 1:]


def _of_unknown_blocks(node):
    """Rows behind a size that is not known, the steps of a recurrent network say, are kept, merged with that, or taken apart."""
    value, out, elements = node.inputs[0], node.outputs[0], node.inputs[1].elements()
    placement = value.placement
    after, some_after = known_product(value.whole[placement.axis + 1:])
    is_asked = node.context.is_only_asked
    if isinstance(placement, RowNumbers) or elements is None or some_after and not is_asked:
        raise Unfit()
    for axis in range(out.rank - 1, -1, -1):
        element = elements[axis]
        if isinstance(element, int) and element >= 0 and (out.dims[axis] is None or not out.varies(axis)):
            continue
        behind, is_unknown = known_product([size if size is not None else known if isinstance(known, int) and known >= 0 else None
                                            for size, known in zip(out.whole[axis + 1:], elements[axis + 1:])])
        if is_unknown:
            raise Unfit()
        times = placement.times or (getattr(element, "times", None) if is_asked else None)
        is_before = any(isinstance(other, int) and other < 0 for other in elements[:axis])  # what is left over stands there
        if isinstance(element, Additive) and element.rows == placement.rows and None not in (element.times, times) and (
                not is_before if some_after else element.times * behind == times * after):
            found = Shard(axis, placement.rows, element.times)
        elif behind != after or some_after:
            raise Unfit()
        elif is_asked and isinstance(element, int) and element < 0 and None in elements[:axis] and _are_sizes(
                node.inputs[1].tensor):
            found = Shard(axis, placement.rows, placement.times)
        elif not all(isinstance(other, int) and other == 1 for other in elements[:axis]):
            raise Unfit()
        elif isinstance(placement, Blocks) and known_product(value.whole[:placement.axis]) == (1, False):
            found = moved(placement, axis)
        elif type(placement) is Shard and (is_asked or placement.rows == BATCH and placement.times):
            found = Blocks(axis, None, placement.rows, placement.times)
        else:
            raise Unfit()
        return node.decide(found, _target(node, elements, axis))
    raise Unfit()


def _are_sizes(shape):
    """Tells whether a shape's elements are sizes as they are, numbers, and none that is computed of them."""
    return shape.op.type != "Pack" or all(source.op.type in ("Const", "StridedSlice") for source in shape.op.inputs)


def _rows_of_any_rank(node):
    """The rows go on: TensorFlow knows no rank of the gradient of a broadcast before it is reshaped."""
    placement, elements = node.inputs[0].placement, node.inputs[1].elements()
    if isinstance(placement, RowNumbers) or elements is None or not len(elements):
        raise Unfit()
    outer = getattr(placement, "outer", 1)
    if outer is None:
        raise Unfit()
    axis = 0 if not placement.axis and outer == 1 else _axis_before_sum(node, placement.axis)
    times = getattr(elements[axis], "times", None)
    if times is None or times % outer or elements[axis].rows != placement.rows or placement.times not in (None, times // outer):
        raise Unfit()
    return node.decide(dataclasses.replace(placement, axis=axis, times=times // outer), _target(node, elements, axis))


def _axis_before_sum(node, axis):
    """Returns the number that an axis has in the shape of a broadcast's input, whose gradient is reshaped to it."""
    total, shape = (value.tensor for value in node.inputs)
    numbers = total.op.inputs[1] if total.op.type == "Sum" and not total.op.get_attr("keep_dims") else None
    if numbers is None or numbers.op.type != "BroadcastGradientArgs" or numbers.op.inputs[numbers.value_index] is not shape:
        raise Unfit()
    rank = max(int(each.shape[0]) for each in numbers.op.inputs)
    summed = axes_of_gradient(node, numbers)
    left = [k for k in range(rank) if k not in summed]
    return left[axis] - (rank - int(shape.shape[0]))


def _times(placement, element, outer, after, behind, is_asked):
    """Returns how many entries an example has along an axis of the output, None if not known; `Unfit` where it is no number."""
    if isinstance(element, Additive) and element.times is not None and element.rows == placement.rows:
        if element.times % outer:
            raise Unfit()
        return element.times // outer
    if isinstance(placement, RowNumbers) and after == behind:
        return placement.times
    times = getattr(placement, "times", None)
    if behind[1] or times is None:
        # Rows may be kept as they are, and no more; who only asks takes a size that is not known for the same one on both sides.
        if is_asked and times and after[1] and behind[1] and behind[0] and times * after[0] % behind[0] == 0:
            return times * after[0] // behind[0]
        if is_asked or after == behind and not after[1]:
            return times
        raise Unfit()
    if is_asked and after[1]:
        return None
    if not behind[0] or times * after[0] % behind[0]:
        raise Unfit()
    return None if after[1] else times * after[0] // behind[0]


def _target(node, elements, axis):
    """Returns wants by which a shape that is reshaped to leaves the size along one axis open, where it may be another tower's."""
    others = [] if elements is None else [element for j, element in enumerate(elements) if j != axis]
    if isinstance(node.inputs[1].placement, Replicate):
        if elements is not None and isinstance(elements[axis], int):
            return {}
        if any(isinstance(element, int) and element == -1 for element in others):
            raise Unfit()
        return {1: ShapeOf(unknown=(axis,))}
    if elements[axis] is not COMPUTED and not any(map(is_of_size, others)):
        return {}
    if any(isinstance(element, int) and element == -1 for element in others):
        raise Unfit()
    return {1: ShapeOf(unknown=(axis,))}
