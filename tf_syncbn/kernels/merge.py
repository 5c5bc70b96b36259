"""The exact merge of moments over towers.

Tower i holds `n_i` values a channel with mean `m_i` and variance `v_i`. What crosses towers is one tensor, the ingredients of
these, so that the arithmetic is done once where towers meet. The merge is that of Chan, Golub and LeVeque ("Updating formulae and
a pairwise algorithm for computing sample variances", 1979).
"""
import numpy as np
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.fused_op import moments_of_rows
from tf_syncbn.kernels.moments import stacked

__all__ = ["merge", "merge_apart", "merge_groups", "merge_merged", "with_count"]


def merge(*per_tower, channels, counts):
    """Merges moments over towers, into a tensor [2C + 1]: the count, the means, the biased variances; see `merge_apart`."""
    return tf.concat(_merge(per_tower, channels, counts), 0)


def merge_apart(*per_tower, channels, counts):
    """Merges moments over towers.

        m_i = s_i + sum d / n_i,    v_i = (sum d^2 - (sum d)^2 / n_i) / n_i
        n = sum n_i,    m = sum n_i m_i / n,    v = sum n_i (v_i + (m_i - m)^2) / n

    Args:
      *per_tower: a tensor [3C], [3C + 1] or, of the fused op's own moments, [2, C] for each tower, from a kernel `local_moments`.
      channels: int, C.
      counts: tuple, for each tower its count `n_i`, an int, or None where its tensor begins with that.

    Returns:
      Two tensors: the count [1], the means and the biased variances [2, C]. All zero where nothing is counted.
    """
    count, mean, variance = _merge(per_tower, channels, counts)
    return count, stacked(mean, variance)


def _merge(per_tower, channels, counts):
    if all(map(_is_pair, per_tower)) and len(set(counts)) == 1 and len(counts) > 1:
        return _merge_alike(per_tower, channels, counts[0])
    per_tower, dtype = [_as_sums(part, n) for part, n in zip(per_tower, counts)], per_tower[0].dtype
    packed = tf.stack(per_tower) if None not in counts else tf.stack(
        [part if n is None else with_count(part, count=n) for n, part in zip(counts, per_tower)])
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
        return count, means[0], variances[0]
    are_equal = isinstance(counts, np.ndarray) and len(set(counts.flat)) == 1

    def average(values):
        return tf.reduce_mean(values, 0) if are_equal else tf.reduce_sum(shares * values, 0)

    # The mean of the towers' differences from the first one loses less than that of large means.
    first = means[0]
    mean = first + average(means - first)
    return count, mean, average(variances + tf.math.squared_difference(means, mean))


def _merge_alike(per_tower, channels, count):
    """Merges the fused op's own moments of equal counts: towers' means are values again, with moments of their own."""
    num_towers = len(per_tower)
    means, spread = (tf.unstack(tf.reshape(part, [2, channels])) for part in moments_of_rows(stacked(*per_tower)))
    variance = means[1] * ((count - 1) / count) + spread[0] * ((num_towers - 1) / num_towers)
    return tf.constant([count * num_towers], variance.dtype), means[0], variance


def _is_pair(part):
    return part.shape.rank == 2


def _as_sums(part, count):
    if not _is_pair(part):
        return part
    mean, unbiased = tf.unstack(part)
    return tf.concat([mean, tf.zeros_like(mean), unbiased * (count - 1)], 0)


def with_count(part, *, count):
    """Returns a tower's tensor, whose count is known, as one that begins with that, [3C + 1]; see `merge`."""
    return tf.concat([tf.constant([count], part.dtype), _as_sums(part, count)], 0)


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


def merge_groups(*per_tower, channels, counts, group_size):
    """Merges moments within each group of consecutive towers, and over all towers.

    Args:
      *per_tower, channels, counts: see `merge`.
      group_size: int that divides the number of towers.

    Returns:
      A tuple of tensors [2C + 1], as `merge` returns them: one for each group, then that of all towers.
    """
    starts = range(0, len(per_tower), group_size)
    groups = [merge(*per_tower[i:i + group_size], channels=channels, counts=counts[i:i + group_size]) for i in starts]
    return tuple(groups + (groups if len(groups) == 1 else [merge(*per_tower, channels=channels, counts=counts)]))
