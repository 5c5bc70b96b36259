"""The fused batch norm and its gradient in inference mode, which take given moments: for products with vectors and their sums."""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.moments import unpack
from tf_syncbn.kernels.rows import join_rows, shape_of

__all__ = ["data_format", "gradient_sums", "has_few_images", "normalize_images", "standardize", "statistics"]

_EPSILON = 1.001e-5  # the least that cuDNN takes
_MOST_IMAGES = 65535  # that cuDNN takes in inference mode: one of 65,536 is a "cuDNN launch failure"


def standardize(x, mean, variance, scale, offset, axis, epsilon, row=0):
    """Computes what `tf_syncbn.kernels.reference.standardize` does, by the fused op."""
    images, vectors = x, (mean, _variance_for(variance, epsilon), *_or_ones_and_zeros(scale, offset, mean))
    if row:
        rows, vectors = join_rows(x, vectors, row)
        images = x if rows.shape[1] == x.shape[-1] else rows
    return _shaped_as(normalize_images(_as_images(images), *vectors, epsilon, data_format(x, axis)), x)


def gradient_sums(dy, x, moments, gamma, epsilon):
    """Computes what `tf_syncbn.kernels.reference.gradient_sums` does, channels last and without a mask, by the fused gradient."""
    _, mean, variance = unpack(moments)
    inverse = tf.rsqrt(variance + epsilon)
    scale = inverse if gamma is None else gamma * inverse
    with tf.control_dependencies([dy]):  # as there
        dy, x = tf.cast(dy, mean.dtype), tf.cast(x, mean.dtype)
        scaled, d_scale, d_offset, _, _ = tf.raw_ops.FusedBatchNormGradV2(
            y_backprop=_as_images(dy), x=_as_images(x), scale=tf.ones_like(mean) if gamma is None else gamma,
            reserve_space_1=mean, reserve_space_2=variance, epsilon=epsilon, is_training=False)
        return tf.stack([d_offset, d_scale, scale]), _shaped_as(scaled, x)


def data_format(x, axis):
    """Returns the fused op's name for where the channels of `x` are."""
    return "NHWC" if axis == x.shape.rank - 1 else "NCHW"


def has_few_images(x):
    """Tells whether cuDNN takes the fused op of `x`; a batch of unknown size does not count as large, unless of vectors."""
    size = tf.dimension_value(x.shape[0])
    return x.shape.rank > 2 if size is None else size <= _MOST_IMAGES


def _or_ones_and_zeros(scale, offset, mean):
    return tf.ones_like(mean) if scale is None else scale, tf.zeros_like(mean) if offset is None else offset


def _as_images(x):
    """Returns `x` in the rank that fused ops take, as many images as it has."""
    if x.shape.rank == 4:
        return x
    channels, inner = tf.dimension_value(x.shape[-1]), x.shape[1:-1].num_elements()
    if inner:
        return tf.reshape(x, [-1, inner, 1, channels])
    sizes = tf.shape(x)
    return tf.reshape(x, tf.stack([sizes[0], tf.reduce_prod(sizes[1:-1]), 1, channels]))


def _shaped_as(images, x):
    if x.shape.rank == 4 and tf.dimension_value(images.shape[-1]) == tf.dimension_value(x.shape[-1]):
        return images
    return tf.reshape(images, shape_of(x))


def statistics(moments, *, epsilon):
    """Returns the mean and the variance that `normalize_images` is to be given, two tensors [C]."""
    _, mean, variance = unpack(moments)
    return mean, _variance_for(variance, epsilon)


def normalize_images(images, mean, variance, scale, offset, epsilon, layout):
    """Normalizes tensors of rank 4 by the fused op in inference mode.

    Args:
      images: float32 tensor [B, H, W, C], on a GPU float16 or [B, C, H, W] as well.
      mean, variance: tensors [C], from `statistics`.
      scale, offset: tensors [C], or None for 1 and 0.
      epsilon: float.
      layout: "NHWC" or "NCHW".

    Returns:
      Tensor of the shape and dtype of `images`.
    """
    y, _, _ = tf.nn.fused_batch_norm(images, *_or_ones_and_zeros(scale, offset, mean), mean, variance,
                                     epsilon=max(epsilon, _EPSILON), data_format=layout, is_training=False)
    return y


def _variance_for(variance, epsilon):
    """Returns the variance, raised by as much as `epsilon` is below the least that the op takes."""
    return variance if epsilon >= _EPSILON else variance + (epsilon - _EPSILON)
