"""Normalization by moving averages, which TensorFlow differentiates by itself."""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels import fused_op
from tf_syncbn.kernels.plain import reference

__all__ = ["normalize_by_averages"]


def normalize_by_averages(x, mean, variance, gamma, beta, epsilon, layer):
    """Computes `gamma (x - mean) / sqrt(variance + epsilon) + beta`; `mean` and `variance` are constants to its gradient.

    Args:
      x: floating point tensor, C channels along `axis`.
      mean, variance: tensors [C] of the accumulator's dtype.
      gamma, beta: tensors [C] of the same dtype, or None.
      epsilon: float.
      layer: the `Layer` of `x`.

    Returns:
      A tensor of the shape and dtype of `x`.
    """
    takes_it = mean.dtype == tf.float32 and layer.is_last and fused_op.has_few_images(layer)
    standardize = fused_op.standardize if takes_it else reference.standardize
    return tf.cast(standardize(tf.cast(x, mean.dtype), mean, variance, gamma, beta, layer.axis, epsilon), layer.dtype)
