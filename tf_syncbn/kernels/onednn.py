"""oneDNN on a CPU: the fused op runs at the speed of memory, and its gradient gives both sums and `a dy` in one."""
from tf_syncbn.kernels import fused_op, reference
from tf_syncbn.kernels.fused_op import standardize
from tf_syncbn.kernels.local_moments import moments_as_it_is, moments_by_differences
from tf_syncbn.kernels.reference import input_gradient_by, normalize_by
from tf_syncbn.kernels.rows import is_small

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

_PRODUCT, _SHORT_PRODUCT = 512, 64  # rows; longer products lose digits
_ROW = 512
_FEW = 1 << 15  # numbers of a tensor up to which moments by differences are faster


def local_moments(x, mask, *, axis):
    """See `tf_syncbn.kernels.reference.local_moments`."""
    if mask is None and not is_small(x, _FEW):
        return moments_as_it_is(x, _SHORT_PRODUCT)
    return moments_by_differences(x, mask, axis, _PRODUCT, _ROW)


def normalize(x, mean, variance, gamma, beta, *, axis, epsilon):
    """See `tf_syncbn.kernels.reference.normalize`."""
    return normalize_by(standardize, x, mean, variance, gamma, beta, axis, epsilon)


def gradient_sums(dy, x, mean, variance, gamma, *, masked, axis, epsilon):
    """See `tf_syncbn.kernels.reference.gradient_sums`."""
    if masked:
        return reference.gradient_sums(dy, x, mean, variance, gamma, masked=True, axis=axis, epsilon=epsilon, product=_PRODUCT,
                                       row=_ROW)
    return fused_op.gradient_sums(dy, x, mean, variance, gamma, epsilon)


def input_gradient(dy, x, count, mean, variance, scale, totals, scaled, training, mask, *, axis, epsilon):
    """See `tf_syncbn.kernels.reference.input_gradient`."""
    return input_gradient_by(standardize, dy, x, count, mean, variance, scale, totals, scaled, training, mask, axis, epsilon)
