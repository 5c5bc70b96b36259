"""Eigen's kernels on a CPU, TensorFlow 2, for small tensors: plain ops start faster than the fused one."""
from tf_syncbn.kernels import reference
from tf_syncbn.kernels.local_moments import moments_by_differences
from tf_syncbn.kernels.reference import input_gradient_by, normalize_by, sums_only

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize", "standardize"]

_PRODUCT = 16384  # rows: a product sums in blocks by itself
_ROW = 512


def standardize(x, mean, variance, scale, offset, axis, epsilon):
    """See `tf_syncbn.kernels.reference.standardize`."""
    return reference.standardize(x, mean, variance, scale, offset, axis, epsilon, _ROW)


def local_moments(x, mask, *, axis):
    """See `tf_syncbn.kernels.reference.local_moments`."""
    return moments_by_differences(x, mask, axis, _PRODUCT, _ROW)


def normalize(x, mean, variance, gamma, beta, *, axis, epsilon):
    """See `tf_syncbn.kernels.reference.normalize`."""
    return normalize_by(standardize, x, mean, variance, gamma, beta, axis, epsilon)


def gradient_sums(dy, x, mean, variance, gamma, *, masked, axis, epsilon):
    """See `tf_syncbn.kernels.reference.gradient_sums`."""
    return sums_only(dy, x, mean, variance, gamma, masked, axis, epsilon, _PRODUCT, _ROW)


def input_gradient(dy, x, count, mean, variance, scale, totals, scaled, training, mask, *, axis, epsilon):
    """See `tf_syncbn.kernels.reference.input_gradient`."""
    return input_gradient_by(standardize, dy, x, count, mean, variance, scale, totals, scaled, training, mask, axis, epsilon,
                             _ROW)
