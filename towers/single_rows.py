"""What a model computes of one of a tower's examples each, which it takes out of the batch one by one."""
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph_walk import NO_VALUES, SIZES

__all__ = ["Row", "Rows"]

_TAKE_ROWS = frozenset(["Gather", "GatherV2", "Split", "SplitV", "StridedSlice", "Unpack"])


class Row(NamedTuple):
    """A tower's example that is known by its number.

    Attributes:
      number: int, from 0.
      source: tensor that it was taken out of, along whose first axis all of the tower's examples lie.
    """
    number: int
    source: tf.Tensor


class Rows:
    """What is computed of a single one of a tower's examples.

    Attributes:
      found: dict from names of tensors to `Row`.
      taken: dict from ops that take single examples out of a tensor to that.
      joined: dict from ops that put what is of each single example together, in the order of the examples, to the tensor that
        these were taken out of.
      mixed: list of (op, tensor): other ops that are computed of an example that was taken out of a tensor and of others.
    """

    def __init__(self):
        self.found, self.taken, self.joined, self.mixed = {}, {}, {}, []
        self._of_others = set()  # names of tensors

    def fill(self, ops, sizes, lie_along, is_given):
        """Looks through ops, and takes what it found of earlier ones for known.

        Args:
          ops: list of a tower's operations, in their order.
          sizes: numbers of examples that the tower is known to have.
          lie_along: function of a tensor that tells whether all examples lie along its first axis.
          is_given: function of a tensor that tells whether it is of all examples.
        """
        for op in ops:
            numbers = _numbers_of(op, sizes, lie_along) if op.type in _TAKE_ROWS else None
            if numbers is not None:
                x = self.taken[op] = _taken_from(op)
                self.found.update((output.name, Row(number, x)) for output, number in zip(op.outputs, numbers))
            elif self.found and op.type not in SIZES and op.type not in NO_VALUES:
                self._follow(op, is_given)

    def _follow(self, op, is_given):
        rows = [self.found[source.name] for source in op.inputs if source.name in self.found]
        numbers = {row.number for row in rows}
        if _is_joined(op, rows):
            self.joined[op] = rows[0].source
            self._of_others.update(output.name for output in op.outputs)
            return
        is_mixed = len(numbers) > 1 or any(
            source.name in self._of_others or source.name not in self.found and is_given(source) for source in op.inputs)
        if is_mixed and rows:
            self.mixed.append((op, rows[0].source))
        for output in op.outputs:
            if is_mixed:
                self._of_others.add(output.name)
            elif rows:
                self.found[output.name] = rows[0]


def _is_joined(op, rows):
    """Tells whether an op puts rows of all examples together along the first axis."""
    if op.type == "ConcatV2":
        axis, parts = tf.get_static_value(op.inputs[-1]), len(op.inputs) - 1
    elif op.type == "Pack":
        axis, parts = op.get_attr("axis"), len(op.inputs)
    else:
        return False
    size = tf.dimension_value(rows[0].source.shape[0]) if rows else None
    return axis == 0 and len(rows) == parts == size and [row.number for row in rows] == list(range(size))


def _taken_from(op):
    return op.inputs[1 if op.type == "Split" else 0]


def _numbers_of(op, sizes, lie_along):
    """Returns the numbers of the examples that an op's outputs are, a list; None where they are no single examples."""
    x = _taken_from(op)
    size = tf.dimension_value(x.shape[0]) if x.shape.rank and x.dtype != tf.resource else None
    is_known = size is not None and size > 1 and size in sizes  # a single one may be taken as it is
    numbers = _numbers(op, size) if is_known else None
    return numbers if numbers is not None and lie_along(x) else None


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
