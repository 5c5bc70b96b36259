"""The fused batch norm: in inference mode, where it takes given moments, and with moments of its own; and its gradients."""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.moments import parts, split, stacked
from tf_syncbn.kernels.rows import join_rows, known_count, shape_of

__all__ = ["LEAST_EPSILON", "as_it_takes", "data_format", "has_few_images", "local_moments", "moments_of_rows",
           "normalize_images", "normalize_images_alone", "own_gradient_kernel", "standardize", "statistics", "sums_kernel"]

LEAST_EPSILON = 1.001e-5 if tf.__version__.startswith("1.") else 0.0  # that this TensorFlow's cuDNN takes
_ANY_EPSILON = 1e-3  # where nothing depends on it
# In which layout rows of channels are normalized: the numbers lie alike in both, but a GPU would transpose them in the other.
# TensorFlow 1 has no fused op for this one on a CPU.
_ROWS = "NHWC" if tf.__version__.startswith("1.") else "NCHW"
_MOST_IMAGES = 65535  # that cuDNN takes in inference mode: one of 65,536 is a "cuDNN launch failure"


def standardize(x, mean, variance, scale, offset, axis, epsilon, row=0):
    """Computes what `tf_syncbn.kernels.plain.reference.standardize` does, by the fused op."""
    images, vectors = x, (mean, variance, *_or_ones_and_zeros(scale, offset, mean))
    if row:
        rows, vectors = join_rows(x, vectors, row)
        images = x if rows.shape[1] == x.shape[-1] else rows
    return _shaped_as(normalize_images(_as_images(images), *vectors, epsilon, data_format(x, axis)), x)


def sums_kernel(plain):
    """Makes the kernel `gradient_sums` of a family: the fused gradient's, and `plain` with a mask or channels elsewhere."""
    def gradient_sums(dy, x, count, mean, variance, gamma, *, masked, axis, epsilon):
        if masked or axis != x.shape.rank - 1:
            return plain(dy, x, count, mean, variance, gamma, masked=masked, axis=axis, epsilon=epsilon)
        _, mean, variance = parts(count, mean, variance)
        inverse = tf.rsqrt(variance + epsilon)
        scale = inverse if gamma is None else gamma * inverse
        with tf.control_dependencies([dy]):  # as there
            dy, x = tf.cast(dy, mean.dtype), tf.cast(x, mean.dtype)
            scaled, d_scale, d_offset, _, _ = tf.raw_ops.FusedBatchNormGradV2(
                y_backprop=_as_images(dy), x=_as_images(x), scale=tf.ones_like(mean) if gamma is None else gamma,
                reserve_space_1=mean, reserve_space_2=variance, epsilon=epsilon, is_training=False)
            return tf.stack([d_offset, d_scale, scale]), _shaped_as(scaled, x)
    return gradient_sums


def own_gradient_kernel(plain):
    """Makes the kernel `gradient_sums` of a family whose tensor is `dx_i`: the fused gradient in training mode, of given moments.

    With a mask it is `plain`. See `tf_syncbn.kernels.plain.own_gradient`.
    """
    def gradient_sums(dy, x, count, mean, variance, gamma, *, masked, axis, epsilon):
        if masked:
            return plain(dy, x, count, mean, variance, gamma, masked=masked, axis=axis, epsilon=epsilon)
        _, mean, variance = parts(count, mean, variance)
        variance, epsilon, channels = _raised(variance, epsilon), max(epsilon, LEAST_EPSILON), tf.dimension_value(mean.shape[0])
        with tf.control_dependencies([dy]):  # as in `tf_syncbn.kernels.plain.reference`
            dy, x = as_it_takes(dy), as_it_takes(x)
        data = tf.cast(_channels_of_one(dy, axis), mean.dtype) if gamma is None else gamma
        zeros, saved = _saved_of(variance, epsilon, data)
        gamma = tf.ones_like(mean) if gamma is None else gamma
        shares = tf.constant(1 / known_count(x, axis), mean.dtype, _shape_of_rows(1, channels))
        scale = _fused_batch_norm(shares, gamma, zeros, epsilon, _ROWS, zeros, variance)[0]
        dx, d_scale, d_offset, _, _ = tf.raw_ops.FusedBatchNormGradV2(
            y_backprop=_as_images(dy), x=_as_images(x), scale=gamma, reserve_space_1=mean, reserve_space_2=saved,
            epsilon=epsilon, data_format=data_format(x, axis), is_training=True)
        return stacked(d_offset, d_scale, tf.reshape(scale, [channels])), _shaped_as(dx, x)
    return gradient_sums


def _channels_of_one(x, axis):
    """Returns the C numbers of `x` at one position."""
    return x[tuple(slice(None) if i == axis else 0 for i in range(x.shape.rank))]


def _saved_of(variance, epsilon, data):
    """Finds what the fused op in training mode saves for its gradient: on a CPU the variance, on a GPU `1 / sqrt(v + epsilon)`.

    Where it is going to run is not known for certain before it does, so it is asked, beside the gradient: for two values of that
    variance, whose mean is zero.

    Args:
      variance: tensor [C].
      epsilon: float.
      data: tensor [C] of any values. What the gradient takes beside moments has to have a part in it: of a constant batch all
        else may be constant, and what is, Grappler asks of a CPU.

    Returns:
      zeros: tensor [C], the mean. TensorFlow does not know that it is zero: of a fused op with four inputs that it knows,
        Grappler makes ops that fail in a loop.
      saved: tensor [C].
    """
    channels, nothing = tf.dimension_value(variance.shape[0]), tf.constant([], variance.dtype)
    two = tf.reshape(tf.sqrt(variance) * tf.constant([[1], [-1]], variance.dtype), _shape_of_rows(2, channels))
    _, zeros, _, _, saved = tf.raw_ops.FusedBatchNormV2(
        x=two, scale=data, offset=data, mean=nothing, variance=nothing, epsilon=epsilon, data_format=_ROWS, is_training=True)
    return zeros, saved


def statistics(moments, *, epsilon):
    """Returns of a vector [2C + 1] what `normalize_images` takes with an epsilon of at least `LEAST_EPSILON`: mean, variance."""
    _, mean, variance = split(moments)
    return mean, _raised(variance, epsilon)


def local_moments(x, axis):
    """Returns one tower's part of the moments, of two or more values a channel: their mean and unbiased variance, [2, C]."""
    return stacked(*_own_moments(_as_images(as_it_takes(x)), data_format(x, axis)))


def moments_of_rows(rows):
    """Returns the means and unbiased variances over axis 0 of a float32 tensor, of size 2 or more; two vectors."""
    return _own_moments(tf.reshape(rows, _shape_of_rows(rows.shape.as_list()[0], rows.shape[1:].num_elements())), _ROWS)


def _shape_of_rows(number, channels):
    return [number, 1, 1, channels] if _ROWS == "NHWC" else [number, channels, 1, 1]


def _own_moments(images, layout):
    channels = tf.dimension_value(images.shape[layout.index("C")])
    ones, zeros = (tf.constant(value, tf.float32, [channels]) for value in (1, 0))
    return _fused_batch_norm(images, ones, zeros, _ANY_EPSILON, layout)[1:]


def as_it_takes(x, dtype=tf.float32):
    """Returns `x` in a dtype that the fused op takes on a GPU: float16 as it is, all else in `dtype`."""
    return x if x.dtype == tf.float16 else tf.cast(x, dtype)


def data_format(x, axis):
    """Returns the fused op's name for where the channels of `x` are."""
    return "NHWC" if axis == x.shape.rank - 1 else "NCHW"


def has_few_images(layer):
    """Tells whether cuDNN takes a layer's fused op; a batch of unknown size does not count as large, unless of vectors."""
    size = tf.dimension_value(layer.shape[0])
    return layer.shape.rank > 2 if size is None else size <= _MOST_IMAGES


def _raised(variance, epsilon):
    return variance + (epsilon - LEAST_EPSILON) if epsilon < LEAST_EPSILON else variance


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


def normalize_images(images, mean, variance, scale, offset, epsilon, layout):
    """Normalizes tensors of rank 4 by the fused op in inference mode.

    Args:
      images: float32 tensor [B, H, W, C], on a GPU float16 or [B, C, H, W] as well.
      mean, variance: tensors [C].
      scale, offset: tensors [C], or None for 1 and 0.
      epsilon: float.
      layout: "NHWC" or "NCHW".

    Returns:
      Tensor of the shape and dtype of `images`.
    """
    variance = _raised(variance, epsilon)
    vectors = _or_ones_and_zeros(scale, offset, mean)
    return _fused_batch_norm(images, *vectors, max(epsilon, LEAST_EPSILON), layout, mean, variance)[0]


def normalize_images_alone(images, scale, offset, epsilon, layer):
    """Normalizes a layer's input, of rank 4 and known size, by its own moments, as a plain batch norm does.

    Returns the output, and the moments as `tf_syncbn.kernels.merge.merge` does, which no gradient passes.
    """
    vectors, count = _or_ones_and_zeros(scale, offset, tf.ones([layer.channels])), layer.count
    y, mean, unbiased = _fused_batch_norm(images, *vectors, epsilon, data_format(layer, layer.axis))
    return y, tf.stop_gradient(tf.concat([[float(count)], mean, unbiased * (max(count - 1, 1) / count)], 0))


def _fused_batch_norm(images, scale, offset, epsilon, layout, mean=None, variance=None):
    # Not tf.nn.fused_batch_norm, which raises an epsilon that cuDNN did not take once, in silence.
    is_training = mean is None
    if is_training:
        mean = variance = tf.constant([], scale.dtype)
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=epsilon, data_format=layout,
        is_training=is_training)
    return y, mean, variance
