"""Eigen's kernels on a CPU, TensorFlow 1: sums by products with ones, and the fused op for products with vectors."""
from tf_syncbn.kernels.fused_op import standardize
from tf_syncbn.kernels.local_moments import moments_kernel
from tf_syncbn.kernels.plain.reference import product_kernels, sums_kernel

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

local_moments = moments_kernel(product=512, short_product=128, few=1 << 15)
normalize, input_gradient = product_kernels(standardize)
gradient_sums = sums_kernel(product=512)
