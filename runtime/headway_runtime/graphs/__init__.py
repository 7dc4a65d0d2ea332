"""Steps as CUDA graphs: recorded once for each of a few forms, then launched as one.

sizes           how many rows forms have, and which of them are recorded at the start
forms           the kinds of steps, and what an engine records of them, in which order
step_buffers    the tensors that a recorded step reads and writes, and the one copy that fills them
capture         what records and launches, of CUDA
graph_memory    what recordings take, and may take
decode_graphs   the recorded step itself, and what may run as one
opening         whether an engine has any, and of what forms
recording       a device for tests, that records on a CPU
"""
