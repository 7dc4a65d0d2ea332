"""What a product of plain 16-bit numbers takes on a CPU beside its result, without products of bfloat16.

Where there are none of its dtype, weights are multiplied in float32 (`layers.linear.WideLinear`): a product
of many rows takes its input once more in that, a tile of its weight, and what the two make.

oneDNN's products of float16 (AVX-512 FP16) copy what they multiply: each thread up to 256 rows of the input
and 64 of the weight, 2048 inputs at once, and what they sum up in float32, for up to 1024 outputs. Measured
with PyTorch 2.15, with 1 to 8 threads and 16 to 2048 rows of 512 to 4096 inputs: never more than that, and
where threads share few rows down to a third of it.
"""

from headway_runtime.fit.placement import Placement

FLOAT32_BYTES = 4
HALF_BYTES = 2
# Of `layers.linear`: a tile of a weight in float32.
WIDE_TILE_NUMBERS = 1 << 19
# Of oneDNN's float16 products, in each thread.
HALF_ROWS = 256
HALF_WEIGHT_ROWS = 64
HALF_INPUTS = 2048
HALF_OUTPUTS = 1024
# What lies between its buffers, and what is there for each product.
HALF_REST_BYTES = 64 << 10


def plain_product_bytes(placement: Placement, rows: int, inputs: int, outputs: int) -> int:
    """Of [rows, inputs] with a weight of [outputs, inputs], in bytes, beside their [rows, outputs]."""
    if placement.widens:
        at_once = min(outputs, max(1, WIDE_TILE_NUMBERS // inputs))
        return FLOAT32_BYTES * (WIDE_TILE_NUMBERS + rows * (inputs + at_once))
    return half_product_bytes(placement, rows, inputs, outputs) if placement.multiplies_halves else 0


def half_product_bytes(
    placement: Placement, rows: int, inputs: int = HALF_INPUTS, outputs: int = HALF_OUTPUTS
) -> int:
    """Of one in float16, of whatever weight unless it is told."""
    copied, summed = min(rows, HALF_ROWS), min(outputs + -outputs % HALF_WEIGHT_ROWS, HALF_OUTPUTS)
    numbers = min(inputs, HALF_INPUTS) * (copied + HALF_WEIGHT_ROWS)
    return placement.num_threads * (HALF_BYTES * numbers + FLOAT32_BYTES * copied * summed + HALF_REST_BYTES)
