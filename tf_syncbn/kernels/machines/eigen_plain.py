"""Eigen's plain ops on a CPU: for float64, which has no fused one, and on TensorFlow 2 for small tensors: they start faster."""
from tf_syncbn.kernels.machines.eigen import gradient_sums, local_moments
from tf_syncbn.kernels.plain.reference import product_kernels, standardize

__all__ = ["gradient_sums", "input_gradient", "local_moments", "normalize"]

normalize, input_gradient = product_kernels(standardize, row=512)
