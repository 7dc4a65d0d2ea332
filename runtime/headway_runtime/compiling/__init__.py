"""Kernels that are compiled before they are launched: on other processors, while weights are loaded.

ahead            what a start has of it: begins, and waits
order            what there is to compile, and whether this machine has done that before
worker           the process that does it
imagined_steps   the steps of a start, and those that may come later, on memory that is not there
step_shapes      which steps these are, so that all kernels are launched
noted_launches   what Triton is asked to launch meanwhile, and compiling it without a GPU
"""
