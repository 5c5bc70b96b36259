"""cuDNN on a GPU where the number of values is not known while the graph is built, and what is not known to run on a CPU.

The gradient is the fused op's in inference mode, which takes towers without values as well.
"""
from tf_syncbn.kernels import fused_op
from tf_syncbn.kernels.plain import scaled_gradient
from tf_syncbn.kernels.plain.reference import local_moments, product_kernels

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

normalize, input_gradient = product_kernels(fused_op.standardize)
gradient_sums = fused_op.sums_kernel(scaled_gradient.gradient_sums)
