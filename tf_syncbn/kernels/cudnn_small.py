"""cuDNN on a GPU, for tensors so small that a tower waits for the host to start its ops: moments by the fused op as well.

Its output is thrown away, which takes longer than other kernels for large tensors.
"""
from tf_syncbn.kernels import cudnn, fused_op
from tf_syncbn.kernels.cudnn import gradient_sums, input_gradient, normalize

__all__ = ["MOST_NUMBERS", "gradient_sums", "input_gradient", "local_moments", "normalize"]

MOST_NUMBERS = 1 << 23  # of a tensor


def local_moments(x, mask, *, axis):
    """See `tf_syncbn.kernels.local_moments`."""
    return cudnn.local_moments(x, mask, axis=axis) if mask is not None else fused_op.local_moments(x, axis)
