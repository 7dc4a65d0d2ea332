"""What both attention kernels do with a tile of keys and values, and the types they are compiled for.

Owns the online softmax (arXiv 1805.02867, 2205.14135) over paged tiles: maxima, sums and weighted values are
float32; exponents are to base 2. Masked keys are not read, so that nothing stale can show.

Codes (see layers/kv_numbers.py) become float16 on their way to a product: that is one instruction for two
numbers, where bfloat16 takes three. Scores are multiplied by the scales of keys. The weights of values are
multiplied by their scales over the tile's largest, so that float16 holds them whatever the scales are.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import DEFAULT, INTERPRETED, Gpu, dot
from headway_runtime.kernels.triton.paged_rows import SEQUENCE_CAPACITIES

LEAST_SCALE: tl.constexpr = tl.constexpr(1e-30)
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# How the cache keeps numbers: as they are, or as codes. "fp8_bits" is for GPUs that convert none themselves.
Coding = Literal["none", "int8", "fp8", "fp8_bits"]


@dataclass(frozen=True, slots=True)
class HeadShape:
    num_kv_heads: int
    num_groups: int
    head_dim: int
    block_size: int

    @property
    def padded_dim(self) -> int:
        return max(16, 1 << (self.head_dim - 1).bit_length())


def coding_of(kept: torch.dtype, gpu: Gpu) -> Coding:
    if kept == torch.int8:
        return "int8"
    if kept == torch.float8_e4m3fn:
        return "fp8" if gpu.capability >= 89 and not INTERPRETED else "fp8_bits"
    return "none"


def operand_of(dtype: torch.dtype, coding: Coding) -> torch.dtype:
    """What products are of. dtype: of queries."""
    return torch.float16 if coding != "none" and dtype == torch.bfloat16 else dtype


def shape_class(dtype: torch.dtype, coding: Coding, shape: HeadShape) -> str:
    """The tables' key: what numbers are kept as, and head size."""
    name = SHORT_NAMES[dtype] if coding == "none" else coding.removesuffix("_bits")
    return f"{name}-d{shape.padded_dim}"


def variant_of(name: str) -> tuple[torch.dtype, Coding, int]:
    """What a shape class is of, for cases to compile: queries' type, coding, head size. "default" is like the
    most demanding of those that it serves."""
    if name == DEFAULT:
        return torch.float32, "none", 256
    kind, _, dim = name.partition("-d")
    dtypes = {short: dtype for dtype, short in SHORT_NAMES.items()}
    coding: Coding = "none" if kind in dtypes else cast("Coding", kind)
    return dtypes.get(kind, torch.bfloat16), coding, int(dim)


def compiled_types(name: str, capability: int) -> tuple[dict[str, str], dict[str, object]]:
    """The signature and the constants that both kernels have in common, of a case for a shape class."""
    dtype, coding, head_dim = variant_of(name)
    short = SHORT_NAMES[dtype]
    if coding == "fp8" and capability < 89:
        coding = "fp8_bits"
    numbers = {"none": short, "int8": "i8"}.get(coding, "u8")
    signature = {
        "query": f"*{short}",
        "out": f"*{short}",
        "numbers": f"*{numbers}",
        "scales": "*fp32",
        **dict.fromkeys(("tables", "context_lengths", "query_starts"), "*i32"),
        **dict.fromkeys(("query_stride", "out_stride", "block_stride"), "i32:16"),
        **dict.fromkeys(("scale_block_stride", "table_stride", "num_sequences", "window"), "i32"),
        **dict.fromkeys(("score_factor", "soft_cap"), "fp32"),
    }
    constants = {
        "head_dim": head_dim,
        "padded_dim": head_dim,
        "num_kv_heads": 8,
        "num_groups": 4,
        "block_size": 16,
        "coding": coding,
        "operand": TRITON_TYPES[operand_of(dtype, coding)],
        "sequence_capacity": SEQUENCE_CAPACITIES[1],
    }
    return signature, constants


def as_loaded(numbers: Tensor, coding: Coding) -> Tensor:
    """Codes that floats are, as bytes."""
    return numbers.view(torch.uint8) if coding in ("fp8", "fp8_bits") else numbers


@triton.jit
def uncoded(x, coding: tl.constexpr, operand: tl.constexpr):
    """Numbers as they were loaded, as operands. Those of "fp8_bits" are 256 times too small."""
    if coding == "fp8":
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(operand)
    if coding == "fp8_bits":
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(operand)
    return x.to(operand)


@triton.jit
def attend_tile(
    query,
    maximum,
    total,
    sums,
    key,
    context,
    row_position,
    table,
    numbers,
    scales,
    block_stride,
    scale_block_stride,
    score_factor,
    soft_cap,
    window,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    has_soft_cap: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    coding: tl.constexpr,
    operand: tl.constexpr,
):
    """One more tile for the softmax of rows: its new maximum, total and sums.

    query: [rows, padded_dim], operands. key: [keys], positions. row_position: [rows].
    numbers, scales: of the head's keys in block 0; its values are num_kv_heads planes on.
    is_masked: not all keys are seen by all rows, or there are fewer.
    """
    dims = tl.arange(0, padded_dim)
    is_dim = dims[None, :] < head_dim
    is_key = key < context
    offset = key % block_size
    if is_masked:
        block = tl.load(table + key // block_size, mask=is_key, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // block_size).to(tl.int64)
    place = (block * block_stride + offset * head_dim)[:, None] + dims[None, :]
    value_plane: tl.constexpr = num_kv_heads * block_size
    if is_masked:
        is_read = is_key[:, None] & is_dim
        keys = tl.load(numbers + place, mask=is_read, other=0)
        values = tl.load(numbers + value_plane * head_dim + place, mask=is_read, other=0)
    elif head_dim != padded_dim:
        keys = tl.load(numbers + place, mask=is_dim, other=0)
        values = tl.load(numbers + value_plane * head_dim + place, mask=is_dim, other=0)
    else:
        keys = tl.load(numbers + place)
        values = tl.load(numbers + value_plane * head_dim + place)

    rows: tl.constexpr = query.shape[0]
    scores = dot(
        query, tl.trans(uncoded(keys, coding, operand)), tl.zeros((rows, key.shape[0]), dtype=tl.float32)
    )
    code_unit: tl.constexpr = 256.0 if coding == "fp8_bits" else 1.0
    if coding != "none":
        scale_place = block * scale_block_stride + offset
        if is_masked:
            key_scale = tl.load(scales + scale_place, mask=is_key, other=0.0)
            value_scale = tl.load(scales + value_plane + scale_place, mask=is_key, other=0.0)
        else:
            key_scale = tl.load(scales + scale_place)
            value_scale = tl.load(scales + value_plane + scale_place)
        scores = scores * (key_scale * code_unit)[None, :]
    if has_soft_cap:
        # soft_cap * tanh(x), where score_factor makes the score 2x to base 2.
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * score_factor) + 1.0))
        factor = 1.0
    else:
        factor = score_factor
    if is_masked:
        is_hidden = key[None, :] > row_position[:, None]
        if has_window:
            is_hidden = is_hidden | (key[None, :] <= row_position[:, None] - window)
        scores = tl.where(is_hidden, float("-inf"), scores)

    # Scores are multiplied after their maximum is found: with the subtraction that is one operation.
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
    subtracted = new_maximum
    if is_masked:
        # A row that has seen nothing yet.
        subtracted = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores * factor - subtracted[:, None])
    shrink = tl.exp2(maximum - subtracted)
    total = total * shrink + tl.sum(weights, 1)
    sums = sums * shrink[:, None]
    if coding == "none":
        sums = dot(weights.to(operand), uncoded(values, coding, operand), sums)
    else:
        largest = tl.max(value_scale, 0)
        weights = weights * (value_scale / tl.maximum(largest, LEAST_SCALE))[None, :]
        product = dot(
            weights.to(operand),
            uncoded(values, coding, operand),
            tl.zeros((rows, padded_dim), dtype=tl.float32),
        )
        sums = sums + product * (largest * code_unit)
    return new_maximum, total, sums
