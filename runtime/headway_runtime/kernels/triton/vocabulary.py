"""Rows of logits by blocks: what every choice among them starts from, and the hashes that decide draws.

A row is cut into `num_blocks` blocks of `block_size` tokens, as `draws.py` cuts it. One kernel reads all
logits once, wherever they lie, and leaves two numbers per block: its largest logit, and the sum of all exp of
logits less that one. From those alone follow the row's maximum, the normalizer, the race between blocks, and
which blocks any bound leaves out; whoever chooses afterwards reads single blocks.

Bytes: a row of 128,256 bfloat16 is 257 KB, and 2.7 KB of results: 60 ns of an H200's bandwidth, so up to 32
rows it is a launch and a trip to memory, 3 us; at 256 rows 15 us, at 85% of copy bandwidth (programs of 4 KB,
two loads of 16 bytes per thread where blocks begin at multiples of 8 tokens; elsewhere loads are narrower).
The exponentials, one per token, are a third of what the multiprocessors do in that time.

A number that is none counts as infinity here, so that it shows in the maximum: such a row has no token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import launched_early, let_next_begin, wait_for_last


@triton.jit
def mixed(values):
    """`draws._mix`, of blocks of uint32 (the interpreter warns where a single number wraps around)."""
    values ^= values >> 16
    values *= 0x7FEB352D
    values ^= values >> 15
    values *= 0x846CA68B
    values ^= values >> 16
    return values


@triton.jit
def hashes_of(numbers):
    """The hashes of tokens, or of blocks counted on behind them: int32 to uint32."""
    return mixed(numbers.to(tl.uint32, bitcast=True) * 0x1E3779B1 + tl.zeros_like(numbers).to(tl.uint32))


@triton.jit
def split_mixed(values):
    """`draws.split_mix`, of a block of uint64."""
    values += 0x9E3779B97F4A7C15
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)


@triton.jit
def exponentials(hashes):
    """`draws._exponentials`: -log(1 - u), to the last digits for small u as well."""
    uniform = ((mixed(hashes) & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # What is really taken off 1, after rounding: the logarithm is of that, and stretched to u.
    left = 1.0 - uniform
    taken = 1.0 - left
    is_none = taken == 0.0
    return tl.where(is_none, uniform, -tl.log(left) * (uniform / tl.where(is_none, 1.0, taken)))


@triton.jit
def scaled(row_pointer, blocks, columns, temperature, NUM_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Logits over temperature of some tokens of some blocks, float32 [blocks, columns]; -inf for none."""
    is_real = (blocks < NUM_BLOCKS)[:, None] & (columns < BLOCK_SIZE)[None, :]
    places = blocks[:, None] * BLOCK_SIZE + columns[None, :]
    x = tl.load(row_pointer + places, mask=is_real, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    return tl.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
def divisor(temperature):
    """Greedy rows are not divided."""
    return tl.where(temperature < 1e-5, 1.0, temperature)


@triton.jit
def weights_of(x, top):
    """exp(x - top), 0 for -inf whatever the top is."""
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return tl.exp(tl.minimum(x - base, 0.0))


@triton.jit
def block_kernel(
    logits_pointer,
    row_pointer,
    temperature_pointer,
    tops_pointer,
    sums_pointer,
    row_stride,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Programs: (row, TILE_BLOCKS blocks)."""
    let_next_begin(overlaps)
    wait_for_last(overlaps)
    index = tl.program_id(0)
    row = index.to(tl.int64)
    if row_pointer is not None:
        row = tl.load(row_pointer + index).to(tl.int64)
    temperature = 1.0
    if temperature_pointer is not None:
        temperature = divisor(tl.load(temperature_pointer + index))
    blocks = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    tops = tl.full((TILE_BLOCKS,), float("-inf"), tl.float32)
    sums = tl.zeros((TILE_BLOCKS,), tl.float32)
    for start in range(0, BLOCK_SIZE, TILE):
        columns = start + tl.arange(0, TILE)
        x = scaled(logits_pointer + row * row_stride, blocks, columns, temperature, NUM_BLOCKS, BLOCK_SIZE)
        higher = tl.maximum(tops, tl.max(x, 1))
        sums = sums * weights_of(tops, higher) + tl.sum(weights_of(x, higher[:, None]), 1)
        tops = higher
    places = index * NUM_BLOCKS + blocks
    tl.store(tops_pointer + places, tops, mask=blocks < NUM_BLOCKS)
    tl.store(sums_pointer + places, sums, mask=blocks < NUM_BLOCKS)


@dataclass(frozen=True, slots=True)
class BlockNumbers:
    """Of some rows. tops, sums: float32 [rows, blocks]. block_size: tokens of a block."""

    tops: Tensor
    sums: Tensor
    block_size: int


def tile_of(block_size: int, tile: int) -> tuple[int, int]:
    """How many blocks, and tokens of each, make a tile of `tile` numbers."""
    columns = min(tile, int(triton.next_power_of_2(block_size)))
    return max(1, tile // columns), columns


def block_numbers(
    logits: Tensor, rows: Tensor | None, temperatures: Tensor | None, block_size: int
) -> BlockNumbers:
    """logits: [rows, vocabulary]. rows: int32, which of them; None: all. temperatures: float32, of each of
    those rows, below 1e-5 as 1; None: 1. block_size: a divisor of the vocabulary's size."""
    num_rows = len(logits) if rows is None else len(rows)
    num_blocks = logits.shape[1] // block_size
    assert logits.stride(1) == 1
    assert num_blocks * block_size == logits.shape[1]
    shape = (num_rows, num_blocks)
    tops = torch.empty(shape, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(tops)
    if num_rows:
        gpu = gpu_of(logits.device)
        values = configuration("vocabulary_blocks", DEFAULT, gpu)
        tile_blocks, columns = tile_of(block_size, values.pop("TILE"))
        block_kernel[(num_rows, triton.cdiv(num_blocks, tile_blocks))](
            logits,
            rows,
            temperatures,
            tops,
            sums,
            logits.stride(0),
            NUM_BLOCKS=num_blocks,
            BLOCK_SIZE=block_size,
            TILE_BLOCKS=tile_blocks,
            TILE=columns,
            **values,
            **launched_early(gpu),
        )
    return BlockNumbers(tops, sums, block_size)


def block_numbers_by_torch(logits: Tensor, temperatures: Tensor, block_size: int) -> BlockNumbers:
    """The reference."""
    blocks = (logits.float() / temperatures.unsqueeze(1)).view(len(logits), -1, block_size)
    tops = blocks.amax(-1)
    return BlockNumbers(tops, (blocks - tops.unsqueeze(2)).exp().sum(-1), block_size)


def _cases() -> list[CompileCase]:
    """Vocabularies of Llama 3 and Qwen 3: blocks of 384 and of 1187; some rows, and all as they are."""
    cases = []
    for one in configurations("vocabulary_blocks"):
        constants, options = split_options(one.values)
        tile = constants.pop("TILE")
        for num_blocks, block_size in ((334, 384), (128, 1187)):
            tile_blocks, columns = tile_of(block_size, tile)
            asked = {"row_pointer": "*i32", "temperature_pointer": "*fp32"} if block_size == 384 else {}
            absent = {} if asked else {"row_pointer": None, "temperature_pointer": None}
            cases.append(
                CompileCase(
                    f"{one.label} {num_blocks}x{block_size}",
                    block_kernel,
                    {
                        "logits_pointer": "*bf16",
                        "tops_pointer": "*fp32",
                        "sums_pointer": "*fp32",
                        "row_stride": "i32:16",
                        **asked,
                    },
                    {
                        **absent,
                        "NUM_BLOCKS": num_blocks,
                        "BLOCK_SIZE": block_size,
                        "TILE_BLOCKS": tile_blocks,
                        "TILE": columns,
                    },
                    options,
                    one.capabilities,
                )
            )
    return cases


COMPILED = _cases()
