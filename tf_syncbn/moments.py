"""Counts, means and centred squares of one tower, and their exact merge over towers.

Tower i holds `n_i` values a channel with mean `m_i` and centred squares `M_i = sum (x - m_i)^2`. What crosses towers is
one vector of 2C + 1 numbers, and the merge is that of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm
for computing sample variances", 1979). `E[x^2] - E[x]^2` is used nowhere: at a mean of 1e4 standard deviations it leaves
no digit in float32.
"""
import tensorflow.compat.v1 as tf

__all__ = ["along", "channel_sums", "local_moments", "merge", "merge_groups", "unpack"]

_BLOCK = 256  # rows summed at a time


def channel_sums(x, axis):
    """Sums over all axes but the channels', in two levels.

    TensorFlow's CPU kernel adds row to row: over a third of a million rows of float32 with a mean of 1e4 standard deviations
    its sum was off by 1e-3, and a variance built on it by 4e-3 (1.15.5). Sums of blocks were off by 5e-7, and no slower.

    Args:
      x: floating point tensor, C channels along `axis`.
      axis: int, not negative.

    Returns:
      Tensor [C] of the dtype of `x`.
    """
    rank = x.shape.rank
    if axis != rank - 1:
        sums = tf.reduce_sum(x, list(range(axis + 1, rank)))
        return tf.reduce_sum(sums, list(range(axis))) if axis else sums
    channels = tf.dimension_value(x.shape[axis])
    rows = tf.reshape(x, [-1, channels])
    count = tf.dimension_value(rows.shape[0])
    if count is not None and count < 2 * _BLOCK:
        return tf.reduce_sum(rows, 0)
    whole = (tf.shape(rows)[0] if count is None else count) // _BLOCK * _BLOCK
    sums = tf.reduce_sum(tf.reduce_sum(tf.reshape(rows[:whole], [-1, _BLOCK, channels]), 1), 0)
    return sums if count == whole else sums + tf.reduce_sum(rows[whole:], 0)


def local_moments(x, axis, mask=None):
    """Computes one tower's moments: `d = x - s`, `M = sum d^2 - (sum d)^2 / n`, `m = s + sum d / n`, `s` a first mean.

    Args:
      x: float32 or float64 tensor, C channels along `axis`.
      axis: int, not negative.
      mask: weights of the positions, of the dtype of `x`, shape broadcastable to `x` with size 1 along `axis`; or None.

    Returns:
      Tensor [2C + 1] of the dtype of `x`: the count, the means, the centred squares. All zero where nothing is counted.
    """
    count = _count(x, axis, mask)
    share = tf.div_no_nan(tf.ones([], x.dtype), count)
    weighted = x if mask is None else _masked(x, mask)
    # Any s near the mean will do; a sum of many large numbers is no better than near.
    near = channel_sums(weighted, axis) * share
    centred = x - along(near, x, axis)
    squares = tf.square(centred)
    if mask is not None:
        centred, squares = _masked(centred, mask), _masked(squares, mask)
    rest = channel_sums(centred, axis)
    centred_squares = tf.maximum(channel_sums(squares, axis) - tf.square(rest) * share, 0)
    return tf.concat([tf.reshape(count, [1]), near + rest * share, centred_squares], 0)


def _masked(x, mask):
    return tf.where_v2(mask > 0, x * mask, tf.zeros_like(x))  # not a product alone: padding may hold NaN


def along(vector, x, axis):
    """Returns a vector [C] in a shape that broadcasts to `x` along `axis`."""
    return vector if axis == x.shape.rank - 1 else tf.reshape(vector, [-1] + [1] * (x.shape.rank - 1 - axis))


def _count(x, axis, mask):
    if mask is None:
        sizes = [tf.dimension_value(size) for i, size in enumerate(x.shape) if i != axis]
        if None not in sizes:
            count = 1
            for size in sizes:
                count *= size
            return tf.constant(count, x.dtype)
        sizes = tf.shape(x, out_type=tf.int64)
        return tf.cast(tf.reduce_prod(tf.gather(sizes, [i for i in range(x.shape.rank) if i != axis])), x.dtype)
    sizes = [1 if i == axis else size for i, size in enumerate(tf.unstack(tf.shape(x)))]
    return tf.reduce_sum(tf.broadcast_to(mask, sizes))


def unpack(packed, channels):
    """Splits a vector [2C + 1] into a count [], means [C] and centred squares or variances [C]."""
    count, mean, spread = tf.split(packed, [1, channels, channels])
    return tf.reshape(count, []), mean, spread


def merge(per_tower):
    """Merges moments over towers.

        n = sum n_i,    m = sum n_i m_i / n,    M = sum M_i + sum n_i (m_i - m)^2,    var = M / n

    Args:
      per_tower: list over towers of tensors [2C + 1], from `local_moments`.

    Returns:
      Tensor [2C + 1]: the count, the means, the biased variances. All zero where nothing is counted.
    """
    packed = tf.stack(per_tower)
    channels = (tf.dimension_value(packed.shape[1]) - 1) // 2
    counts, means, squares = tf.split(packed, [1, channels, channels], axis=1)
    count = tf.reduce_sum(counts, 0)
    share = tf.div_no_nan(tf.ones_like(count), count)
    # The mean of the towers' differences from the first one loses less than that of large means.
    first = means[:1]
    mean = first[0] + tf.reduce_sum(counts * (means - first), 0) * share
    squares = tf.reduce_sum(squares + counts * tf.square(means - mean), 0)
    return tf.concat([count, mean, squares * share], 0)


def merge_groups(group_size):
    """Returns an aggregate for `towers.exchange`: moments of each group of consecutive towers, and of all towers.

    Args:
      group_size: int, or None where all towers are one group.

    Returns:
      A function of a list over towers of [packed moments] that returns a list over towers of [the group's, all towers'].
    """
    def aggregate(per_tower):
        packed = [contribution for contribution, in per_tower]
        whole = merge(packed)
        if group_size is None or group_size == len(packed):
            return [[whole, whole]] * len(packed)
        groups = [merge(packed[i:i + group_size]) for i in range(0, len(packed), group_size)]
        return [[group, whole] for group in groups for _ in range(group_size)]
    return aggregate
