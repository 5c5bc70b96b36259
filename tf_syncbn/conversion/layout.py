"""Along which axes of each tensor the examples of a batch lie.

A batch norm is what takes means over examples. They lie along axis 0 of what a model function was given; transpositions and
reshapes move them. Where an op of no known kind loses them, or data comes from elsewhere (noise, a placeholder), they are
presumed along axis 0.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.mapped import mapped_from
from towers.single_rows import Rows
from tf_syncbn.conversion.axis_rules import follow, reduced_axes
from tf_syncbn.conversion.dependence import is_of_variables, settle
from tf_syncbn.conversion.factors import Known, along_first, level, plain

__all__ = ["Examined", "Layout"]


class Examined(NamedTuple):
    """Ops of a model, and what is known of them.

    Attributes:
      order: dict from the operations to their places among them.
      layout: `Layout`, where examples lie.
      of_data: set of those that depend on data.
      of_weights: set of those that depend on variables and on no data.
    """
    order: dict
    layout: Any
    of_data: set
    of_weights: set


class Layout:
    """Where examples lie in the tensors of a model.

    Args:
      ops: list of operations.
      batch: list of tensors, what the ops were given.

    Attributes:
      rows: `towers.single_rows.Rows`, what is computed of single examples.
    """

    def __init__(self, ops, batch):
        self._made, self._given = set(ops), {tensor.name for tensor in batch}
        self._sizes = {tf.dimension_value(tensor.shape[0]) for tensor in batch if tensor.shape.rank}
        self._answers, self.rows = {}, Rows()
        self._answers = settle(ops, self._follow)

    def _follow(self, op, answers):
        self._answers = answers
        self.rows.fill([op], self._sizes, lambda x: 0 in self.axes(x), lambda x: bool(self.axes(x)))
        found = follow(op, [self._known(tensor) for tensor in op.inputs])
        for rows in [self.rows.joined[op]] if op in self.rows.joined else mapped_from(op):
            first = (self._known(rows).axes or ((),))[:1]
            found = [known._replace(axes=first + known.axes[1:]) if known.axes and level(first[0]) else known for known in found]
        return found

    def _known(self, tensor):
        if tensor.op in self._made and tensor.name not in self._given:
            return self._answers[tensor.op][tensor.value_index] if tensor.op in self._answers else Known()
        if tensor.name in self._given:
            return Known(along_first(tensor, 2))
        return Known(plain(tensor) if is_of_variables(tensor.op) else along_first(tensor))

    def axes(self, tensor):
        """Returns the axes of a tensor along which examples lie, a list."""
        return [i for i, axis in enumerate(self._known(tensor).axes or ()) if level(axis)]

    def is_sure(self, tensor):
        """Tells whether examples are known, not only presumed, to lie along some axis of a tensor."""
        return max(map(level, self._known(tensor).axes or ()), default=0) > 1

    def is_count(self, tensor):
        """Tells whether a scalar is the size of what holds examples, so that it adds up over towers."""
        size, = self._known(tensor).sizes or [None] if tensor.shape.rank == 0 else [None]
        return size is not None and sum(factor.of_examples > 0 for factor in size) == 1

    def is_number_of(self, tensor, x, reduced):
        """Tells whether a scalar is how many values of `x` lie along the axes `reduced` together."""
        size, = self._known(tensor).sizes or [None] if tensor.shape.rank == 0 else [None]
        axes = self._known(x).axes
        if size is None or axes is None or len(axes) != x.shape.rank:
            return False
        return _product(size) == _product([factor for axis in reduced for factor in axes[axis]])

    def number(self, tensor):
        """Returns the value of a scalar that is a product of known sizes; else None."""
        size, = self._known(tensor).sizes or [None] if tensor.shape.rank == 0 else [None]
        if size is None or not all(isinstance(factor.size, int) and factor.size >= 0 for factor in size):
            return None
        return tf.TensorShape([factor.size for factor in size]).num_elements()

    def crosses(self, op):
        """Tells whether a reduction takes examples together.

        Returns:
          "all" of them, "some" of them where groups of examples that are not consecutive are reduced, or None. Groups of
          consecutive examples are those of one tower, and what is reduced for each of them is exact there.
        """
        axes, reduced = self.axes(op.inputs[0]), reduced_axes(op)
        if reduced is None or not reduced.intersection(axes):
            return None
        kept = [axis for axis in axes if axis not in reduced]
        return "all" if not kept else "some" if kept[0] > min(reduced.intersection(axes)) else None


def _product(factors):
    """Returns a product in a form that can be compared: a number, and what stands for the unknown sizes."""
    sizes = [factor.size for factor in factors]
    known = [size for size in sizes if isinstance(size, int)]
    return tf.TensorShape(known).num_elements(), sorted(size for size in sizes if not isinstance(size, int))
