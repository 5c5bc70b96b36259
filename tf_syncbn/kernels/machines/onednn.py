"""oneDNN on a CPU: the fused op runs at the speed of memory, and its gradient gives both sums and `a dy` in one."""
from tf_syncbn.kernels import fused_op
from tf_syncbn.kernels.local_moments import moments_kernel
from tf_syncbn.kernels.plain.reference import product_kernels, sums_kernel

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

_PRODUCT, _ROW = 512, 512  # longer products lose digits

local_moments = moments_kernel(_PRODUCT, short_product=64, row=_ROW, few=1 << 15)
normalize, input_gradient = product_kernels(fused_op.standardize)
gradient_sums = fused_op.sums_kernel(sums_kernel(_PRODUCT, _ROW, with_scaled=True))
