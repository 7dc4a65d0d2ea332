"""Kernels that run on NVIDIA GPUs: one a file, with its launcher and the plain torch reference of both."""
