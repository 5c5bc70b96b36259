"""The kernels of batch norm: normalize with given moments, and the sums and products of its gradient.

Differences from the mean come first: `x * a + (beta - mean * a)` would cancel where the mean is large.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.moments import along, channel_sums

__all__ = ["gradient_sums", "input_gradient", "normalize"]


def normalize(x, mean, variance, gamma, beta, epsilon, axis):
    """Computes `gamma (x - mean) / sqrt(variance + epsilon) + beta`.

    Args:
      x: float32 or float64 tensor, C channels along `axis`.
      mean, variance: tensors [C] of the dtype of `x`.
      gamma, beta: tensors [C] of the dtype of `x`, or None.
      epsilon: float.
      axis: int, not negative.

    Returns:
      A tensor of the shape and dtype of `x`.
    """
    scale = tf.rsqrt(variance + epsilon)
    if gamma is not None:
        scale *= gamma
    y = (x - along(mean, x, axis)) * along(scale, x, axis)
    return y if beta is None else y + along(beta, x, axis)


def gradient_sums(dy, x, mean, axis):
    """Computes `sum dy` and `sum dy (x - mean)` over all axes but the channels', two tensors [C]."""
    return channel_sums(dy, axis), channel_sums(dy * (x - along(mean, x, axis)), axis)


def input_gradient(dy, x, mean, scale, offset, slope, axis, mask=None):
    """Computes `scale dy + mask (offset + slope (x - mean))`, a tensor like `x`; the vectors are [C]."""
    from_moments = along(offset, x, axis) + along(slope, x, axis) * (x - along(mean, x, axis))
    if mask is not None:
        from_moments *= mask
    return along(scale, x, axis) * dy + from_moments
