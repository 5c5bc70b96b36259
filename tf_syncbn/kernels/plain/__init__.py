"""Kernels of plain ops, which TensorFlow differentiates to any order."""
