"""The exact merge of moments over towers.

Tower i holds `n_i` values a channel with mean `m_i` and centred squares `M_i = sum (x - m_i)^2`. What crosses towers is
one vector of 3C + 1 numbers, the ingredients of these: vector arithmetic costs by the op, not by the number, so it is done
once where towers meet. The merge is that of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm
for computing sample variances", 1979).
"""
import tensorflow.compat.v1 as tf

__all__ = ["merge", "merge_groups", "unpack"]


def unpack(moments):
    """Splits a vector [2C + 1] into a count [], means [C] and biased variances [C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    count, mean, variance = tf.split(moments, [1, channels, channels])
    return tf.reshape(count, []), mean, variance


def merge(*per_tower):
    """Merges moments over towers.

        m_i = s_i + sum d / n_i,    M_i = sum d^2 - (sum d)^2 / n_i
        n = sum n_i,    m = sum n_i m_i / n,    M = sum M_i + sum n_i (m_i - m)^2,    var = M / n

    Args:
      *per_tower: a tensor [3C + 1] for each tower, from the kernel `local_moments`.

    Returns:
      Tensor [2C + 1]: the count, the means, the biased variances. All zero where nothing is counted.
    """
    packed = tf.stack(per_tower)
    channels = (tf.dimension_value(packed.shape[1]) - 1) // 3
    counts, near, sums, squares = tf.split(packed, [1, channels, channels, channels], axis=1)
    rests = tf.div_no_nan(sums, tf.broadcast_to(counts, tf.shape(sums)))
    means = near + rests
    squares = tf.maximum(squares - sums * rests, 0)
    count = tf.reduce_sum(counts, 0)
    share = tf.div_no_nan(tf.ones_like(count), count)
    # The mean of the towers' differences from the first one loses less than that of large means.
    first = means[:1]
    mean = first[0] + tf.reduce_sum(counts * (means - first), 0) * share
    squares = tf.reduce_sum(squares + counts * tf.square(means - mean), 0)
    return tf.concat([count, mean, squares * share], 0)


def merge_groups(*per_tower, group_size):
    """Merges moments within each group of consecutive towers, and over all towers.

    Args:
      *per_tower: a tensor [3C + 1] for each tower, from the kernel `local_moments`.
      group_size: int that divides the number of towers.

    Returns:
      A tuple of tensors [2C + 1], as `merge` returns them: one for each group, then that of all towers.
    """
    groups = [merge(*per_tower[i:i + group_size]) for i in range(0, len(per_tower), group_size)]
    return tuple(groups + (groups if len(groups) == 1 else [merge(*per_tower)]))
