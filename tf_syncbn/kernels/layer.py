"""What a layer is, found out once, where it begins."""
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.rows import accumulator, known_count

__all__ = ["Layer"]


class Layer(NamedTuple):
    """A layer's input, as far as it is known while the graph is built.

    Attributes:
      shape: `tf.TensorShape`, of known rank.
      dtype: `tf.DType`.
      axis: int, the channels' axis, not negative.
    """
    shape: tf.TensorShape
    dtype: tf.DType
    axis: int

    @property
    def is_last(self):
        """Whether channels lie along the last axis."""
        return self.axis == self.shape.rank - 1

    @property
    def channels(self):
        """C, an int; None where it is not known."""
        return tf.dimension_value(self.shape[self.axis])

    @property
    def positions(self):
        """The `tf.TensorShape` without the channels."""
        return tf.TensorShape([size for i, size in enumerate(self.shape.as_list()) if i != self.axis])

    @property
    def count(self):
        """How many values a channel has, an int; None where that is not known."""
        return known_count(self, self.axis)

    @property
    def accumulator(self):
        """The `tf.DType` of its statistics."""
        return accumulator(self.dtype)
