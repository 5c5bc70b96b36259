"""Eigen's plain ops on a CPU: for float64, which has no fused one, and on TensorFlow 2 for small tensors: they start faster."""
from tf_syncbn.kernels import reference
from tf_syncbn.kernels.local_moments import moments_as_it_is, moments_by_differences
from tf_syncbn.kernels.reference import input_gradient_by, normalize_by, sums_only
from tf_syncbn.kernels.rows import is_small

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize", "standardize"]

_PRODUCT, _SHORT_PRODUCT = 16384, 128  # rows: a product sums in blocks by itself
_ROW = 512


def standardize(x, mean, variance, scale, offset, axis, epsilon):
    """See `tf_syncbn.kernels.reference.standardize`."""
    return reference.standardize(x, mean, variance, scale, offset, axis, epsilon, _ROW)


def local_moments(x, mask, *, axis):
    """See `tf_syncbn.kernels.reference.local_moments`."""
    if mask is None and not is_small(x):
        return moments_as_it_is(x, _SHORT_PRODUCT)
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
