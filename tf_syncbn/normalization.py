"""The kernels of batch norm besides its moments: normalize with given ones, and the sums and products of its gradient.

Differences from the mean come first: `x * a + (beta - mean * a)` would cancel where the mean is large. What is used is
what was fastest of some thirty combinations of TensorFlow's own ops, two towers on CPU, shapes of 1 to 8 MB, forward and
backward over the fused op's time:

- 1.15.5, and 2.x without oneDNN: differences by `bias_add`, kept from the moments and turned into the output in place,
  sums by products with ones: 0.66 to 0.90. The gradient op of the fused kernel in inference mode, which gives both sums at
  once, and its forward op for products with vectors came to 0.71 to 0.95.
- The fused op's own moments, its output thrown away, are no way out: its variance is off by up to 1e3 where the mean is
  1e4 standard deviations, with and without oneDNN.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.moments import accumulator, add_along, along, channel_sums, unpack

__all__ = ["gradient_sums", "input_gradient", "normalize", "normalize_differences"]


def normalize(x, mean, variance, gamma, beta, epsilon, axis):
    """Computes `gamma (x - mean) / sqrt(variance + epsilon) + beta` by ops that TensorFlow differentiates.

    Args:
      x: floating point tensor, C channels along `axis`.
      mean, variance: tensors [C] of the accumulator's dtype.
      gamma, beta: tensors [C] of the same dtype, or None.
      epsilon: float.
      axis: int, not negative.

    Returns:
      A tensor of the shape and dtype of `x`.
    """
    dtype = x.dtype
    x = tf.cast(x, mean.dtype)
    scale = tf.rsqrt(variance + epsilon)
    if gamma is not None:
        scale *= gamma
    y = add_along(x, -mean, axis) * along(scale, x, axis)
    return tf.cast(y if beta is None else add_along(y, beta, axis), dtype)


def normalize_differences(differences, near, moments, gamma, beta, axis, epsilon, dtype):
    """Computes what `normalize` does from `x - near`, which the moments have computed already.

    Args:
      differences: tensor `x - near`, C channels along `axis`, in the accumulator's dtype.
      near: tensor [C].
      moments: tensor [2C + 1], see `tf_syncbn.moments.merge`.
      gamma, beta: tensors [C] of the same dtype, or None.
      axis: int, not negative.
      epsilon: float.
      dtype: of the result.

    Returns:
      A tensor of the shape of `differences`.
    """
    _, mean, variance = unpack(moments)
    scale = tf.rsqrt(variance + epsilon)
    if gamma is not None:
        scale *= gamma
    offset = (near - mean) * scale
    if beta is not None:
        offset += beta
    return tf.cast(add_along(differences * along(scale, differences, axis), offset, axis), dtype)


def gradient_sums(dy, x, moments, masked, axis, sums_by):
    """Computes `S = sum dy` and `P = sum dy (x - mean)` over all axes but the channels'.

    Args:
      dy, x: tensors of one shape and dtype, C channels along `axis`.
      moments: tensor [2C + 1], see `tf_syncbn.moments.merge`.
      masked: whether positions may be masked, so that `x` may be NaN where `dy` is 0.
      axis: int, not negative.
      sums_by: see `tf_syncbn.moments.channel_sums`.

    Returns:
      Tensor [2C] of the accumulator's dtype: S, P.
    """
    dy, x = (tf.cast(t, accumulator(t.dtype)) for t in (dy, x))
    _, mean, _ = unpack(moments)
    centred = add_along(x, -mean, axis)
    products = tf.math.multiply_no_nan(centred, dy) if masked else centred * dy
    return tf.concat([channel_sums(dy, axis, sums_by), channel_sums(products, axis, sums_by)], 0)


def input_gradient(dy, x, moments, gamma, totals, moment_totals, training, mask, axis, epsilon):
    """Computes one tower's part of the gradient by `x`, from sums over all towers.

        dx = a (dy - w (S + r^2 P (x - mean)) / n) + w (G_mean + 2 G_var (x - mean)) / n

    with `r = 1 / sqrt(var + epsilon)`, `a = gamma r`, the mask `w`, and `G`, what else pulls at the moments.

    Args:
      dy, x: tensors of one shape and dtype, C channels along `axis`.
      moments: tensor [2C + 1], see `tf_syncbn.moments.merge`.
      gamma: tensor [C] of the accumulator's dtype, or None.
      totals: tensor [2C], S and P from `gradient_sums`, of all towers.
      moment_totals: tensor [2C], G_mean and G_var of all towers; None stands for zeros.
      training: scalar bool tensor; where it is False the moments are constants. None stands for True.
      mask: weights of the positions, of a shape that broadcasts to `x`, or None.
      axis: int, not negative.
      epsilon: float.

    Returns:
      A tensor of the shape and dtype of `x`.
    """
    dtype = x.dtype
    dy, x = (tf.cast(t, accumulator(t.dtype)) for t in (dy, x))
    count, mean, variance = unpack(moments)
    share = tf.div_no_nan(tf.ones([], x.dtype), count)
    if training is not None:
        share = tf.where_v2(training, share, tf.zeros_like(share))
    inverse = tf.rsqrt(variance + epsilon)
    scale = inverse if gamma is None else gamma * inverse
    sum_dy, sum_products = tf.split(totals * share, 2)
    centred = add_along(x, -mean, axis)

    def from_moments(offset, slope):
        pull = add_along(centred * along(slope, x, axis), offset, axis)
        return pull if mask is None else tf.where_v2(mask > 0, pull * mask, tf.zeros_like(pull))

    dx = (from_moments(-sum_dy, -tf.square(inverse) * sum_products) + dy) * along(scale, x, axis)
    if moment_totals is not None:
        d_mean, d_variance = tf.split(moment_totals * share, 2)
        dx += from_moments(d_mean, 2 * d_variance)
    return tf.cast(dx, dtype)
