"""The gradient as a tower's own batch norm has it, and what it differs by from that of all towers; plain ops.

With the moments of all towers, a tower's `n_i` values a channel and their sums `S_i` and `T_i`:

    dx_i = a (dy - S_i / n_i - r T_i (x - mean) / n_i)
    dx = dx_i + a (S_i / n_i - S / n) + a r (T_i / n_i - T / n) (x - mean)

The first is what cuDNN's gradient of a batch norm in training computes of moments that it is given. These kernels are those of
`tf_syncbn.kernels.plain.reference` but for that tensor `dx_i`, which stands in the place of `a dy`, for the scale, `a / n_i`,
and for the sums over towers, of which they take the tower's share, `n_i S / n` and `n_i T / n`. With a mask there is none of
this.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.moments import parts
from tf_syncbn.kernels.plain import reference, scaled_gradient
from tf_syncbn.kernels.rows import known_count

__all__ = ["gradient_sums", "input_gradient", "input_gradient_kernel"]


def gradient_sums(dy, x, count, mean, variance, gamma, *, masked, axis, epsilon):
    """See `tf_syncbn.kernels.plain.reference.sums_kernel`; returns `dx_i` behind the sums."""
    how = {"axis": axis, "epsilon": epsilon}
    sums, scaled = scaled_gradient.gradient_sums(dy, x, count, mean, variance, gamma, masked=masked, **how)
    if masked:
        return sums,
    _, mean, variance = parts(count, mean, variance)
    scale = sums[2] / known_count(x, axis)
    own = sums * scale
    dx = scaled - reference.standardize(tf.cast(x, mean.dtype), mean, variance, own[1], own[0], **how)
    return tf.concat([sums[:2], [scale]], 0), dx


def input_gradient_kernel(standardize, masked, cast=tf.cast):
    """Makes the kernel `input_gradient`.

    Args:
      standardize: see `tf_syncbn.kernels.plain.reference.product_kernels`.
      masked: the kernel that takes the place of this one where there is a mask.
      cast: a function that casts `x`, given the dtype of the moments, to one that `standardize` takes.
    """
    def input_gradient(dy, x, count, mean, variance, scale, sums, means, scaled, training, mask, *, axis, epsilon):
        """See `tf_syncbn.kernels.plain.reference.product_kernels`; `scaled` is `dx_i`."""
        if scaled is None:
            return masked(dy, x, count, mean, variance, scale, None, means, None, training, mask, axis=axis, epsilon=epsilon)
        _, mean, variance = parts(count, mean, variance)
        if training is not None:
            means = tf.where_v2(training, means, tf.zeros_like(means))
        with tf.control_dependencies([means]):  # as in `gradient_sums`
            given = cast(x, mean.dtype)
            of_moments = None if means.shape[0] == 3 else means[3:] * (1 / known_count(x, axis))
            shares = means if of_moments is None else means[:3]
            offset, slope, _ = tf.unstack((sums - shares) * scale)
            dx = scaled + standardize(given, mean, variance, slope, offset, axis, epsilon)
            if of_moments is not None:
                slope = 2 * of_moments[1] * tf.sqrt(variance + epsilon)
                dx += standardize(given, mean, variance, slope, of_moments[0], axis, epsilon)
            return tf.cast(dx, x.dtype),

    return input_gradient


input_gradient = input_gradient_kernel(reference.standardize, reference.input_gradient)
