"""cuDNN on a GPU, for inputs of a known shape: moments by the fused op, and its gradient in training mode.

Few ops, which is what a GPU waits for the host to start. The fused op's output is thrown away, as the moments are a tower's own.
The gradient in training mode is deterministic, and the layout optimizer moves it along with its neighbours; that in inference
mode is neither.
"""
from tf_syncbn.kernels import fused_op
from tf_syncbn.kernels.machines import cudnn_unsized
from tf_syncbn.kernels.machines.cudnn_unsized import normalize
from tf_syncbn.kernels.plain import reference
from tf_syncbn.kernels.plain.own_gradient import input_gradient_kernel

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

gradient_sums = fused_op.own_gradient_kernel(reference.gradient_sums)
input_gradient = input_gradient_kernel(fused_op.standardize, cudnn_unsized.input_gradient, fused_op.as_it_takes)


def local_moments(x, mask, *, axis):
    """See `tf_syncbn.kernels.fused_op.local_moments`; with a mask, `tf_syncbn.kernels.local_moments`."""
    return reference.local_moments(x, mask, axis=axis) if mask is not None else fused_op.local_moments(x, axis)
