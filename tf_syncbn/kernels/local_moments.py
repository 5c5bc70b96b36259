"""One tower's part of the moments: s, sum d and sum d^2 of differences `d = x - s` from something near the mean.

The count of the values goes before them, where it is not known while the graph is built.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.rows import accumulator, add_along, count_of, is_small, known_count, masked, rows_of, size_of
from tf_syncbn.kernels.sums import add_up, blocks_of, channel_sums, products_of, square_sums, sums_of_blocks, sums_of_squares

__all__ = ["moments_as_it_is", "moments_by_differences", "moments_kernel"]

_SAMPLE = 16  # one row in so many is enough for a first mean
_LONG_SAMPLE = 4096  # rows of a sample above which its sum takes blocks
_FEW = 128  # rows that are taken whole: to choose among them takes longer
_LARGE_MEAN = 4.0  # in standard deviations, above which differences are summed


def moments_kernel(product=0, short_product=0, row=0, few=None):
    """Makes the kernel `local_moments` of a family, a function of `x` and a mask.

    Args:
      product, row: see `moments_by_differences`.
      short_product: int, see `moments_as_it_is`.
      few: int, numbers of a tensor up to which it takes differences; without, and with a mask, it always does.
    """
    def local_moments(x, mask, *, axis):
        if mask is None and few is not None and not is_small(x, few):
            return moments_as_it_is(x, short_product)
        return moments_by_differences(x, mask, axis, product, row)
    return local_moments


def moments_by_differences(x, mask, axis, product=0, row=0):
    """Computes them of differences that are written.

    `s` is the mean of every position where they are few or masked, else that of the first sixteenth. That is near enough
    whatever the data: the mean of a part `f` of all values lies within `std / sqrt(f)` of the mean of all, so no more than
    the last four bits of the centred squares are lost.

    Args:
      x: floating point tensor, C channels along `axis`.
      mask: weights of the positions, in the accumulator's dtype, of a shape that broadcasts to `x`, size 1 along `axis`;
        or None.
      axis: int, not negative.
      product: see `tf_syncbn.kernels.sums.channel_sums`.
      row: see `tf_syncbn.kernels.rows.join_rows`.

    Returns:
      Tensor [3C] of the accumulator's dtype: s, sum d, sum d^2; [3C + 1], the count first, where that is unknown or masked. All
      zero where nothing is counted.
    """
    x = tf.cast(x, accumulator(x.dtype))
    count = count_of(x, axis, mask)
    if mask is None:
        near = _first_mean(x, axis, product)
        differences = add_along(x, -near, axis, row)
        sums = channel_sums(differences, axis, product)
        squares = square_sums(differences, axis, product, sums)
    else:
        near = channel_sums(masked(x, mask), axis, product) * tf.div_no_nan(tf.ones([], x.dtype), count)
        differences = add_along(x, -near, axis, row)
        sums = channel_sums(masked(differences, mask), axis, product)
        squares = channel_sums(masked(tf.square(differences), mask), axis, product)
    return tf.concat(_unless_known(count, x, axis, mask) + [near, sums, squares], 0)


def moments_as_it_is(x, product=0):
    """Computes them of sums of x and x^2, and where a mean is too large for that, of differences from the mean.

    `sum x^2 - (sum x)^2 / n` is off by `1 + 3 mean^2 / var` times as much as the sums are, so these are of few rows each, added
    up in float64. Where a mean is larger than four deviations all rows are summed again, else none of them: no control flow.

    Args:
      x: floating point tensor, C channels along the last axis.
      product: see `tf_syncbn.kernels.sums.channel_sums`.

    Returns:
      Tensor, see `moments_by_differences`; s is the mean.
    """
    is_narrow, x = x.dtype != accumulator(x.dtype), tf.cast(x, accumulator(x.dtype))
    axis, rows = x.shape.rank - 1, rows_of(x)
    count = count_of(x, axis)
    # Grappler moves a cast behind every reshape of it: products would be given one of their own.
    products, blocks = None if is_narrow else products_of(rows, product), blocks_of(rows)
    sums = sums_of_blocks(blocks) if products is None else add_up([products])
    squares = sums_of_squares(blocks)
    mean = sums * tf.div_no_nan(tf.ones([], tf.float64), tf.cast(count, tf.float64))
    of_mean = mean * sums
    centred = squares - of_mean
    # Neither is so of NaN.
    are_right = tf.reduce_all(tf.logical_and(of_mean <= _LARGE_MEAN ** 2 * centred, centred <= rows.dtype.max))
    minus_mean = -tf.cast(mean, rows.dtype)
    again = [tf.nn.bias_add(block[:tf.where_v2(are_right, 0, size_of(block))], minus_mean) for block in blocks]
    squares = tf.where_v2(are_right, centred, sums_of_squares(again))
    moments = tf.cast(tf.concat([mean, sums_of_blocks(again), squares], 0), rows.dtype)
    return tf.concat(_unless_known(count, x, axis) + [moments], 0)


def _unless_known(count, x, axis, mask=None):
    return [tf.reshape(count, [1])] if known_count(x, axis, mask) is None else []


def _first_mean(x, axis, product):
    """Returns the mean of a sample of `x`, near enough to its mean to take differences from."""
    sample = rows_of(x) if axis == x.shape.rank - 1 else x
    count = tf.dimension_value(sample.shape[0])
    if axis and (count is None or count >= _FEW or sample is x):
        sample = sample[:(size_of(sample) + _SAMPLE - 1) // _SAMPLE]
    sample_axis = axis if sample.shape.rank == x.shape.rank else 1
    size = count_of(sample, sample_axis)
    if sample_axis == 1 and sample.shape.rank == 2 and 0 < (tf.dimension_value(sample.shape[0]) or 0) <= _LONG_SAMPLE:
        return tf.reduce_mean(sample, 0)
    return channel_sums(sample, sample_axis, product) * tf.div_no_nan(tf.ones([], x.dtype), size)
