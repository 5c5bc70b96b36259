"""Eigen's kernels on a CPU, TensorFlow 2: long products with ones, and the fused op over joined rows.

The fused op starts anew in each row, so that short ones are joined.
"""
from tf_syncbn.kernels.fused_op import standardize
from tf_syncbn.kernels.local_moments import moments_kernel
from tf_syncbn.kernels.plain.reference import product_kernels, sums_kernel

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

_PRODUCT, _ROW = 16384, 512  # a product sums in blocks by itself

local_moments = moments_kernel(_PRODUCT, short_product=128, row=_ROW, few=1 << 17)
normalize, input_gradient = product_kernels(standardize, _ROW)
gradient_sums = sums_kernel(_PRODUCT, _ROW)
