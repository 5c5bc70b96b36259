"""A GPU's large float32 tensors of few channels: as cuDNN computes them, but for the gradient, by products and sums of blocks.

cuDNN's gradient gives each channel to one of a GPU's hundred and more processors, so that few channels leave most of them idle.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels import fused_op
from tf_syncbn.kernels.machines.cudnn import local_moments
from tf_syncbn.kernels.machines.cudnn_unsized import input_gradient, normalize
from tf_syncbn.kernels.moments import parts, stacked
from tf_syncbn.kernels.plain import scaled_gradient
from tf_syncbn.kernels.sums import channel_sums

__all__ = ["LEAST_NUMBERS", "MOST_CHANNELS", "gradient_sums", "input_gradient", "local_moments", "normalize"]

LEAST_NUMBERS, MOST_CHANNELS = 1 << 22, 64


def gradient_sums(dy, x, count, mean, variance, gamma, *, masked, axis, epsilon):
    """See `tf_syncbn.kernels.plain.reference.sums_kernel`."""
    if masked:
        return scaled_gradient.gradient_sums(dy, x, count, mean, variance, gamma, masked=True, axis=axis, epsilon=epsilon)
    _, mean, variance = parts(count, mean, variance)
    ones, zeros, inverse = tf.ones_like(mean), tf.zeros_like(mean), tf.rsqrt(variance + epsilon)
    scale = inverse if gamma is None else gamma * inverse
    with tf.control_dependencies([dy]):  # as there
        dy, x = tf.cast(dy, mean.dtype), tf.cast(x, mean.dtype)
        products = fused_op.standardize(x, mean, variance, None, None, axis, epsilon) * dy
        sums = stacked(channel_sums(dy, axis), channel_sums(products, axis), scale)
        return sums, fused_op.standardize(dy, zeros, ones, scale, None, axis, 0.0)
