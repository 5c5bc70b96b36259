"""Normalization by moving averages, which TensorFlow differentiates by itself."""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels import fused_op, reference

__all__ = ["normalize_by_averages"]


def normalize_by_averages(x, mean, variance, gamma, beta, epsilon, axis):
    """Computes `gamma (x - mean) / sqrt(variance + epsilon) + beta`; `mean` and `variance` are constants to its gradient.

    Args:
      x: floating point tensor, C channels along `axis`.
      mean, variance: tensors [C] of the accumulator's dtype.
      gamma, beta: tensors [C] of the same dtype, or None.
      epsilon: float.
      axis: int, not negative.

    Returns:
      A tensor of the shape and dtype of `x`.
    """
    takes_it = mean.dtype == tf.float32 and axis == x.shape.rank - 1 and fused_op.has_few_images(x)
    standardize = fused_op.standardize if takes_it else reference.standardize
    return tf.cast(standardize(tf.cast(x, mean.dtype), mean, variance, gamma, beta, axis, epsilon), x.dtype)
