"""Tensors of safetensors files on their way to a device.

tensor_files     what a model's weights are read through, and the way that CPUs take
tensor_places    where in which file each tensor lies
lanes            threads that read pieces of files into pinned memory, and copy them on
streamed_files   the way that GPUs take: reads and copies overlap, and run ahead of what is asked for
opening          which way is taken
"""
