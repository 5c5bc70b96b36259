"""What a model computes of one of a tower's examples each, which it takes out of the batch one by one."""
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.along_examples import NO_VALUES, SIZES

__all__ = ["Row", "rows_of"]

_TAKE_ROWS = frozenset(["Gather", "GatherV2", "Split", "SplitV", "StridedSlice", "Unpack"])


class Row(NamedTuple):
    """A tower's example that is known by its number.

    Attributes:
      number: int, from 0.
      source: tensor that it was taken out of, along whose first axis all of the tower's examples lie.
    """
    number: int
    source: tf.Tensor


def rows_of(ops, examples, sizes):
    """Returns what is computed of a single one of a tower's examples, a dict from names of tensors to `Row`.

    Args:
      ops: list of a tower's operations, in their order.
      examples: `towers.along_examples.Examples` of the tower.
      sizes: dict, see `towers.along_examples.sizes_of_examples`.
    """
    taken = {}
    for op in ops:
        if op.type in _TAKE_ROWS:
            x = op.inputs[1 if op.type == "Split" else 0]
            size = tf.dimension_value(x.shape[0]) if x.shape.rank and x.dtype != tf.resource else None
            numbers = _numbers(op, size) if size in sizes and size > 1 else None  # a single one may be taken as it is
            if numbers is not None and examples.lie_along(x):
                taken.update((output.name, Row(number, x)) for output, number in zip(op.outputs, numbers))
    return _computed_of(ops, taken, examples) if taken else {}


def _numbers(op, size):
    """Returns the number of the row that each output of an op is, of `size` rows, a list; None where they are no single rows."""
    if op.type == "Unpack":
        return range(size) if op.get_attr("axis") % op.inputs[0].shape.rank == 0 else None
    if op.type in ("Split", "SplitV"):
        axis = tf.get_static_value(op.inputs[0 if op.type == "Split" else 2])
        is_whole = axis is not None and int(axis) % op.outputs[0].shape.rank == 0 and len(op.outputs) == size
        return range(size) if is_whole and all(output.shape[0] == 1 for output in op.outputs) else None
    if op.type != "StridedSlice":
        number, axis = tf.get_static_value(op.inputs[1]), 0 if op.type == "Gather" else tf.get_static_value(op.inputs[2])
        return [int(number) % size] if axis == 0 and np.ndim(number) == 0 and number is not None else None
    first, last = (tf.get_static_value(tensor) for tensor in list(op.inputs)[1:3])
    if first is None or (op.get_attr("begin_mask") | op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")) & 1:
        return None
    is_single = op.get_attr("shrink_axis_mask") & 1 or (
        last is not None and not op.get_attr("end_mask") & 1 and last[0] == first[0] + 1)
    return [int(first[0]) % size] if is_single else None


def _computed_of(ops, taken, examples):
    """Returns `taken` with all that is computed of these, and of no other example."""
    found, of_others = dict(taken), set()  # names of tensors
    for op in ops:
        if op.type in SIZES or op.type in NO_VALUES:
            continue
        rows = [found[source.name] for source in op.inputs if source.name in found]
        is_mixed = len({row.number for row in rows}) > 1 or any(
            source.name in of_others or examples.is_given(source) for source in op.inputs)
        for output in op.outputs:
            if output.name not in taken and is_mixed:
                of_others.add(output.name)
            elif output.name not in taken and rows:
                found[output.name] = rows[0]
    return found
