"""cuDNN on a GPU, and what is not known to run on a CPU: the fused op, and sums that round no input.

Sums of x as it is would have to wait for one another there.
"""
from tf_syncbn.kernels import fused_op, reference
from tf_syncbn.kernels.fused_op import standardize
from tf_syncbn.kernels.local_moments import moments_by_differences
from tf_syncbn.kernels.reference import input_gradient_by, normalize_by

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]


def local_moments(x, mask, *, axis):
    """See `tf_syncbn.kernels.reference.local_moments`."""
    return moments_by_differences(x, mask, axis)


def normalize(x, mean, variance, gamma, beta, *, axis, epsilon):
    """See `tf_syncbn.kernels.reference.normalize`."""
    return normalize_by(standardize, x, mean, variance, gamma, beta, axis, epsilon)


def gradient_sums(dy, x, mean, variance, gamma, *, masked, axis, epsilon):
    """See `tf_syncbn.kernels.reference.gradient_sums`."""
    if masked or axis != x.shape.rank - 1:
        return reference.gradient_sums(dy, x, mean, variance, gamma, masked=masked, axis=axis, epsilon=epsilon)
    return fused_op.gradient_sums(dy, x, mean, variance, gamma, epsilon)


def input_gradient(dy, x, count, mean, variance, scale, totals, scaled, training, mask, *, axis, epsilon):
    """See `tf_syncbn.kernels.reference.input_gradient`."""
    return input_gradient_by(standardize, dy, x, count, mean, variance, scale, totals, scaled, training, mask, axis, epsilon)
