"""Decode steps as CUDA graphs: recorded once for each of a few sizes, then launched as one.

sizes           which sizes there are, which of them are recorded at the start, which one a step takes
step_buffers    the tensors that a recorded step reads and writes, and the one copy that fills them
capture         what records and launches, of CUDA
decode_graphs   the recorded step itself, and what may run as one
opening         whether an engine has any, and of what sizes
"""
