"""What Triton's attention keeps on a GPU from step to step: the parts that a decode's programs leave.

As `kernels.triton.paged_decode.make_workspace` allocates it, once for all layers of a model. Attention of
these kernels takes nothing else: keys and values are read where they lie, codes too, and no mask is made.
"""

from headway_runtime.model_config import ModelConfig

# Of `kernels.triton.paged_rows` and of all tables of configurations.
MOST_DECODED_TOKENS = 8
MOST_ROWS = 64
MOST_SEQUENCES = 8192
LEAST_PADDED_HEAD = 32
MOST_PROGRAMS_PER_MULTIPROCESSOR = 4
# A program leaves at most two parts: float32 sums of each row, its maximum and its total.
PARTS_PER_PROGRAM = 2
FLOAT32_BYTES = 4
INT32_BYTES = 4


def decode_workspace_bytes(model: ModelConfig, num_multiprocessors: int) -> int:
    """model: one rank's share. num_multiprocessors: of the GPU; 0 where these kernels do not run."""
    if not num_multiprocessors:
        return 0
    groups = model.num_attention_heads // model.num_kv_heads
    rows = max(_power_of_two(groups), min(MOST_ROWS, _power_of_two(MOST_DECODED_TOKENS * groups)))
    numbers = rows * (max(LEAST_PADDED_HEAD, _power_of_two(model.head_dim)) + 2)
    parts = PARTS_PER_PROGRAM * MOST_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    return parts * numbers * FLOAT32_BYTES + MOST_SEQUENCES * model.num_kv_heads * INT32_BYTES


def _power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()
