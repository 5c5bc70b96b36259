"""Moments as they cross towers: in one tensor, as vector arithmetic costs by the op, not by the number.

Of all towers they are packed, a vector [2C + 1], or apart, a count [1] and a pair [2, C]; a pair of None says packed.
"""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["apart", "bessel", "joined", "of_pair", "parts", "split", "stacked", "three"]


def split(moments):
    """Splits a vector [2C + 1] into a count [1], means [C] and biased variances [C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    return tf.split(moments, [1, channels, channels])


def apart(moments):
    """Splits a vector [2C + 1] into a count [1], and means and biased variances [2, C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    count, pair = tf.split(moments, [1, 2 * channels])
    return count, tf.reshape(pair, [2, channels])


def stacked(*tensors):
    """Stacks tensors of one shape along a new axis 0. On a GPU two take one launch so, where `tf.stack` copies one by one."""
    number, rows = np.arange(len(tensors)).reshape([-1] + [1] * tensors[0].shape.rank), tensors[0]
    for index, tensor in enumerate(tensors[1:], 1):
        rows = tf.where_v2(number == index, tensor, rows)
    return rows


def of_pair(count, pair):
    """Returns what `apart` returns as kernels take it, which need no count; without a pair `count` is the vector [2C + 1]."""
    return (count, None, None) if pair is None else (None, *tf.unstack(pair))


def three(count, pair):
    """Returns the count [1], means [C] and biased variances [C] of what `of_pair` takes."""
    return split(count) if pair is None else (count, *tf.unstack(pair))


def parts(count, mean, variance):
    """Returns the three; where the latter two are None, the parts of a vector [2C + 1] that stands in the place of the first."""
    return split(count) if mean is None else (count, mean, variance)


def joined(count, pair):
    """Returns the vector [2C + 1] of what `apart` returns; see `of_pair`."""
    return count if pair is None else tf.concat([count, *tf.unstack(pair)], 0)


def bessel(count):
    """Returns the factor from a biased variance to an unbiased one, `n / max(n - 1, 1)`."""
    return count / tf.maximum(count - 1, 1)
