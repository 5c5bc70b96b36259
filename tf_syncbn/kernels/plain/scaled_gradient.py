"""The reference's gradient with `a dy` beside the sums, as kernels have it that get it for nothing; plain ops.

What computes it by an op of its own keeps it in memory for it, which is slower than to multiply later.
"""
from tf_syncbn.kernels.plain.reference import input_gradient, sums_kernel

__all__ = ["gradient_sums", "input_gradient"]

gradient_sums = sums_kernel(with_scaled=True)
