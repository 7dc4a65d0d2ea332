"""Triton kernels for a layer, or None where it has to do with others: see kernel_choice.py."""
