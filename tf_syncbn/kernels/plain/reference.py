"""The reference: plain ops that TensorFlow differentiates to any order, for any axis, dtype and mask.

Families of kernels are made of the same functions, with their own products with vectors, and other sizes of products and rows.
Differences from the mean come first: `x * a + (beta - mean * a)` would cancel where the mean is large.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.local_moments import moments_kernel
from tf_syncbn.kernels.moments import parts
from tf_syncbn.kernels.rows import add_along, along, masked, multiply_along
from tf_syncbn.kernels.sums import channel_sums

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize", "product_kernels", "standardize", "sums_kernel"]


def standardize(x, mean, variance, scale, offset, axis, epsilon, row=0):
    """Computes `scale (x - mean) / sqrt(variance + epsilon) + offset`; a scale of None is 1, an offset of None 0."""
    inverse = tf.rsqrt(variance + epsilon)
    scale = inverse if scale is None else scale * inverse
    y = multiply_along(add_along(x, -mean, axis, row), scale, axis, row)
    return y if offset is None else add_along(y, offset, axis, row)


def product_kernels(standardize, row=0):
    """Makes the kernels `normalize` and `input_gradient` of a family.

    Args:
      standardize: the family's own, a function as the one above.
      row: int, see `tf_syncbn.kernels.rows.join_rows`.
    """
    def normalize(x, count, mean, variance, gamma, beta, *, axis, epsilon):
        """Computes `gamma (x - mean) / sqrt(variance + epsilon) + beta`.

        From `x` again, not from the differences that its moments were computed of: to keep these until the towers have met
        would save no time, and take as much memory as the output.

        Args:
          x: floating point tensor, C channels along `axis`.
          count, mean, variance: tensors [1], [C] and [C] of the accumulator's dtype, or packed, see `moments.parts`.
          gamma, beta: tensors [C] of that dtype, or None for 1 and 0.
          axis: int, not negative.
          epsilon: float.

        Returns:
          A tensor of the shape and dtype of `x`.
        """
        _, mean, variance = parts(count, mean, variance)
        with tf.control_dependencies([mean]):  # not before the towers have met
            wide = tf.cast(x, mean.dtype)
        return tf.cast(standardize(wide, mean, variance, gamma, beta, axis, epsilon, row), x.dtype)

    def input_gradient(dy, x, count, mean, variance, scale, sums, means, scaled, training, mask, *, axis, epsilon):
        """Computes one tower's part of the gradient by `x`, from sums over all towers.

            dx = a (dy - w (S + r T (x - mean)) / n) + w (G_mean + 2 G_var (x - mean)) / n

        with `r = 1 / sqrt(var + epsilon)`, the mask `w`, and `G`, what else pulls at the moments.

        Args:
          dy, x: tensors of one shape and dtype, C channels along `axis`; `dy` may be None where there is `scaled`.
          count, mean, variance: see `normalize`.
          scale: tensor [C], a from `gradient_sums`.
          sums: tensor [3, C], this tower's from `gradient_sums`, for families that need more of them than these of all towers.
          means: tensor [3, C] or [5, C], the sums over all towers of what `gradient_sums` returned, and of G_mean and G_var where
            these are not zeros, over `n`; zeros where nothing is counted.
          scaled: tensor `a dy`, if `gradient_sums` gave it, or None.
          training: scalar bool tensor; where it is False the moments are constants. None stands for True.
          mask: weights of the positions, of a shape that broadcasts to `x`, or None.
          axis: int, not negative.
          epsilon: float.

        Returns:
          A tuple of one tensor of the shape and dtype of `x`.
        """
        _, mean, variance = parts(count, mean, variance)
        dtype = x.dtype
        if training is not None:
            means = tf.where_v2(training, means, tf.zeros_like(means))
        with tf.control_dependencies([means]):  # as in `gradient_sums`
            x = tf.cast(x, mean.dtype)

            def pull(offset, slope):
                pulled = standardize(x, mean, variance, slope, offset, axis, epsilon, row)
                return pulled if mask is None else masked(pulled, mask)

            pulled = pull(*tf.unstack(means if scaled is None else means * scale)[:2])
            dx = multiply_along(tf.cast(dy, x.dtype) - pulled, scale, axis, row) if scaled is None else scaled - pulled
            if means.shape[0] > 3:
                dx += pull(means[3], 2 * means[4] * tf.sqrt(variance + epsilon))
            return tf.cast(dx, dtype),

    return normalize, input_gradient


def sums_kernel(product=0, row=0, with_scaled=False):
    """Makes the kernel `gradient_sums` of a family; for `product` and `row` see `tf_syncbn.kernels.local_moments`."""
    def gradient_sums(dy, x, count, mean, variance, gamma, *, masked, axis, epsilon):
        """Computes `S = sum dy`, `T = sum dy r (x - mean)` and `a = gamma r`, `r = 1 / sqrt(var + epsilon)`, and `a dy`.

        `a` lies in one tensor with the sums so that the gradient of `gamma`, which is T, can't be there before `gamma` has been
        read for the last time: an optimizer may write it at once. TensorFlow's gating says so by control dependencies, and
        Grappler loses those where it moves a constant factor through the kernel's last product.

        Args:
          dy, x: tensors of one shape and dtype, C channels along `axis`.
          count, mean, variance: see `product_kernels`.
          gamma: tensor [C] of that dtype, or None.
          masked: whether positions may be masked, so that `x` may be NaN where `dy` is 0.
          axis: int, not negative.
          epsilon: float.

        Returns:
          A tuple of a tensor [3, C] of the accumulator's dtype, the rows S, T and a, and of `a dy`, of the same dtype; where a
          family does not need that, of the first alone.
        """
        _, mean, variance = parts(count, mean, variance)
        inverse = tf.rsqrt(variance + epsilon)
        scale = inverse if gamma is None else gamma * inverse
        # TensorFlow runs an op as soon as it can: what needs x alone would run in the forward pass and be kept for this one.
        with tf.control_dependencies([dy]):
            dy, x = tf.cast(dy, mean.dtype), tf.cast(x, mean.dtype)
            centred = add_along(x, -mean, axis, row)
            products = tf.math.multiply_no_nan(centred, dy) if masked else centred * dy
            sums = tf.stack([channel_sums(dy, axis, product), channel_sums(products, axis, product) * inverse, scale])
            return (sums, dy * along(scale, x, axis)) if with_scaled else (sums,)

    return gradient_sums


local_moments, gradient_sums = moments_kernel(), sums_kernel()
normalize, input_gradient = product_kernels(standardize)
