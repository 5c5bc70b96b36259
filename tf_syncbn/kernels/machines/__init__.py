"""Kernels of one machine each: cuDNN, oneDNN, Eigen."""
