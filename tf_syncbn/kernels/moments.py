"""The exact merge of moments over towers.

Tower i holds `n_i` values a channel with mean `m_i` and variance `v_i`. What crosses towers is one vector, the ingredients of
these: vector arithmetic costs by the op, not by the number, so it is done once where towers meet. The merge is that of Chan,
Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["bessel", "merge", "merge_groups", "merge_merged", "parts", "split"]


def split(moments):
    """Splits a vector [2C + 1] into a count [1], means [C] and biased variances [C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    return tf.split(moments, [1, channels, channels])


def parts(count, mean, variance):
    """Returns the three; where the latter two are None, the parts of a vector [2C + 1] that stands in the place of the first."""
    return split(count) if mean is None else (count, mean, variance)


def bessel(count):
    """Returns the factor from a biased variance to an unbiased one, `n / max(n - 1, 1)`."""
    return count / tf.maximum(count - 1, 1)


def merge(*per_tower, counts):
    """Merges moments over towers.

        m_i = s_i + sum d / n_i,    v_i = (sum d^2 - (sum d)^2 / n_i) / n_i
        n = sum n_i,    m = sum n_i m_i / n,    v = sum n_i (v_i + (m_i - m)^2) / n

    Args:
      *per_tower: a tensor [3C] or [3C + 1] for each tower, from a kernel `local_moments`.
      counts: tuple, for each tower its count `n_i`, an int, or None where its tensor begins with that.

    Returns:
      Tensor [2C + 1]: the count, the means, the biased variances. All zero where nothing is counted.
    """
    dtype, channels = per_tower[0].dtype, tf.dimension_value(per_tower[0].shape[0]) // 3
    packed = tf.stack(per_tower) if None not in counts else tf.stack(
        [part if n is None else tf.concat([tf.constant([n], dtype), part], 0) for n, part in zip(counts, per_tower)])
    if None in counts:
        counts, near, sums, squares = tf.split(packed, [1, channels, channels, channels], axis=1)
        count = tf.reduce_sum(counts, 0)
        inverse, shares = tf.div_no_nan(tf.ones([], dtype), counts), tf.div_no_nan(counts, count)
    else:
        near, sums, squares = tf.split(packed, 3, axis=1)
        counts = np.array(counts, np.float64)[:, np.newaxis]
        count = tf.constant(counts.sum(0), dtype)
        inverse, shares = (tf.constant(a / np.maximum(b, 1), dtype) for a, b in ((counts > 0, counts), (counts, counts.sum())))
    rests = sums * inverse
    means, variances = near + rests, tf.maximum(squares - sums * rests, 0) * inverse
    if len(per_tower) == 1:
        return tf.concat([count, means[0], variances[0]], 0)
    are_equal = isinstance(counts, np.ndarray) and len(set(counts.flat)) == 1

    def average(values):
        return tf.reduce_mean(values, 0) if are_equal else tf.reduce_sum(shares * values, 0)

    # The mean of the towers' differences from the first one loses less than that of large means.
    first = means[0]
    mean = first + average(means - first)
    return tf.concat([count, mean, average(variances + tf.math.squared_difference(means, mean))], 0)


def merge_merged(merged):
    """Merges moments that `merge` returned.

    Args:
      merged: tensor [W, 2C + 1], W times a count, means and biased variances.

    Returns:
      Tensor [2C + 1], as `merge` returns it.
    """
    channels = (tf.dimension_value(merged.shape[1]) - 1) // 2
    counts, means, variances = tf.split(merged, [1, channels, channels], axis=1)
    count = tf.reduce_sum(counts, 0)
    shares = tf.div_no_nan(counts, count)
    # Taken from the first that has any: what nothing is counted of has a mean of zero, and a difference from that loses digits.
    first = tf.gather(means, tf.argmax(tf.cast(counts[:, 0] > 0, tf.int32)))
    mean = tf.where_v2(count > 0, first + tf.reduce_sum(shares * (means - first), 0), tf.zeros_like(first))
    variance = tf.reduce_sum(shares * (variances + tf.math.squared_difference(means, mean)), 0)
    return tf.concat([count, mean, variance], 0)


def merge_groups(*per_tower, counts, group_size):
    """Merges moments within each group of consecutive towers, and over all towers.

    Args:
      *per_tower, counts: see `merge`.
      group_size: int that divides the number of towers.

    Returns:
      A tuple of tensors [2C + 1], as `merge` returns them: one for each group, then that of all towers.
    """
    starts = range(0, len(per_tower), group_size)
    groups = [merge(*per_tower[i:i + group_size], counts=counts[i:i + group_size]) for i in starts]
    return tuple(groups + (groups if len(groups) == 1 else [merge(*per_tower, counts=counts)]))
