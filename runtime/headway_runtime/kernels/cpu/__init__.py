"""Kernels that run on CPUs: written by `emitter`, compiled and run by `compiler`, one operation a file."""
