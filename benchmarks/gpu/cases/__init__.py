"""Kernels at shapes: what is checked, timed and tuned, a file for each family of them."""
