"""Moments of all towers: a count [1], means [C] and biased variances [C], apart or packed.

Packed they are one vector [2C + 1], which stands in the place of the count, with None in those of the other two.
"""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["bessel", "packed", "parts", "split", "stacked"]


def split(moments):
    """Splits a vector [2C + 1] into a count [1], means [C] and biased variances [C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    return tf.split(moments, [1, channels, channels])


def stacked(*tensors):
    """Stacks tensors of one shape along a new axis 0. On a GPU two take one launch so, where `tf.stack` copies one by one."""
    number, rows = np.arange(len(tensors)).reshape([-1] + [1] * tensors[0].shape.rank), tensors[0]
    for index, tensor in enumerate(tensors[1:], 1):
        rows = tf.where_v2(number == index, tensor, rows)
    return rows


def parts(count, mean, variance):
    """Returns moments apart."""
    return split(count) if mean is None else (count, mean, variance)


def packed(count, mean, variance):
    """Returns moments packed, the vector [2C + 1] alone."""
    return count if mean is None else tf.concat([count, mean, variance], 0)


def bessel(count):
    """Returns the factor from a biased variance to an unbiased one, `n / max(n - 1, 1)`."""
    return count / tf.maximum(count - 1, 1)
