"""Kernels of our own, where PyTorch's operators are not enough."""
