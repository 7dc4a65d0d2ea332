"""What both attention kernels do with a tile of keys and values, and the types they are compiled for.

Owns the online softmax (arXiv 1805.02867, 2205.14135) over paged tiles: maxima, sums and weighted values are
float32; exponents are to base 2. Masked keys are not read, so that nothing stale can show.

Codes (see layers/kv_numbers.py) are loaded in pairs and become float16 on their way to a product: that is one
instruction for two numbers, where bfloat16 takes three. A product is then one of even and one of odd numbers.
Scores are multiplied by the scales of keys. The weights of values are
multiplied by their scales over the tile's largest, so that float16 holds them whatever the scales are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import DEFAULT, INTERPRETED, Gpu, dot
from headway_runtime.kernels.triton.paged_rows import SEQUENCE_CAPACITIES

IS_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
LEAST_SCALE: tl.constexpr = tl.constexpr(1e-30)
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


# Arguments that differ from step to step. Kernels are not made anew for what they happen to be divided by:
# that would be while requests wait.
STEP_POINTERS = ["tables", "context_lengths", "query_starts"]
STEP_INTEGERS = ["table_stride", "num_sequences"]

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
        return max(32, 1 << (self.head_dim - 1).bit_length())


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
    name = f"{8 * dtype.itemsize}bit" if coding == "none" else coding.removesuffix("_bits")
    return f"{name}-d{shape.padded_dim}"


def variant_of(name: str) -> tuple[torch.dtype, Coding, int]:
    """What a shape class is of, for cases to compile: queries' type, coding, head size. "default" is like the
    most demanding of those that it serves."""
    if name == DEFAULT:
        return torch.bfloat16, "none", 256
    kind, _, dim = name.partition("-d")
    coding: Coding = "none" if kind.endswith("bit") else cast("Coding", kind)
    return torch.float32 if kind == "32bit" else torch.bfloat16, coding, int(dim)


def compiled_types(name: str, capability: int) -> tuple[dict[str, str], dict[str, object]]:
    """The signature and the constants that both kernels have in common, of a case for a shape class."""
    dtype, coding, head_dim = variant_of(name)
    short = SHORT_NAMES[dtype]
    if coding == "fp8" and capability < 89:
        coding = "fp8_bits"
    numbers = short if coding == "none" else "i16"
    signature = {
        "query": f"*{short}",
        "out": f"*{short}",
        "numbers": f"*{numbers}",
        "scales": "*fp32",
        **dict.fromkeys(STEP_POINTERS, "*i32:1"),
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


def spill_bytes_allowed(name: str, options: Mapping[str, int]) -> int:
    """What a thread may keep in local memory.

    Much with float32, which is for comparing, not for serving; little where registers are given up for one
    program more: ten of them, of which a thousand sequences take some that tiles do not need.
    """
    if name.startswith("32bit"):
        return 512
    return 40 if "maxnreg" in options else 0


def as_loaded(numbers: Tensor, coding: Coding) -> Tensor:
    """Codes in pairs."""
    return numbers if coding == "none" else numbers.view(torch.int16)


@triton.jit
def unpacked(pairs, coding: tl.constexpr, operand: tl.constexpr):
    """Of pairs of codes the first and the second numbers, as operands. Those of "fp8_bits" are 256 times too
    small.

    On a GPU two pairs become four float16 by few instructions of ours. A byte of an int8 code is one of a
    float16 between 1,024 and 1,280.
    """
    if coding == "fp8":
        first, second = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 sorted;
                .reg .b16 low, high;
                prmt.b32 sorted, $2, $2, 0x3120;
                mov.b32 {low, high}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif coding == "int8" and not IS_INTERPRETED:
        first, second = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 above, low, high, by;
                xor.b32 above, $2, 0x80808080;
                mov.b32 by, 0x64646464;
                prmt.b32 low, above, by, 0x4240;
                prmt.b32 high, above, by, 0x4341;
                mov.b32 by, 0x64806480;
                sub.rn.f16x2 $0, low, by;
                sub.rn.f16x2 $1, high, by;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first, second = _from_byte(pairs & 0xFF, coding), _from_byte((pairs >> 8) & 0xFF, coding)
    return first.to(operand), second.to(operand)


@triton.jit
def _from_byte(byte, coding: tl.constexpr):
    """int16 from 0 to 255."""
    if coding == "int8":
        number = ((byte ^ 0x80) - 0x80).to(tl.float16)
    else:
        number = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return number


@triton.jit
def load_queries(place, is_row, head_dim: tl.constexpr, padded_dim: tl.constexpr, coding: tl.constexpr):
    """Rows' queries: whole ones and zeros, or where keys come in pairs of codes their even and odd numbers.

    place: [rows, 1], pointers. Returns twice [rows, numbers].
    """
    if coding == "none":
        dims = tl.arange(0, padded_dim)[None, :]
        even = tl.load(place + dims, mask=is_row & (dims < head_dim), other=0.0)
        odd = even
    else:
        pairs = 2 * tl.arange(0, padded_dim // 2)[None, :]
        even = tl.load(place + pairs, mask=is_row & (pairs < head_dim), other=0.0)
        odd = tl.load(place + pairs + 1, mask=is_row & (pairs < head_dim), other=0.0)
    return even, odd


@triton.jit
def no_sums(rows: tl.constexpr, padded_dim: tl.constexpr, coding: tl.constexpr):
    """Zeros to add to: whole sums, and one that counts for nothing; or those of even and odd numbers."""
    if coding == "none":
        even, odd = tl.zeros((rows, padded_dim), dtype=tl.float32), 0.0
    else:
        even = tl.zeros((rows, padded_dim // 2), dtype=tl.float32)
        odd = even
    return even, odd


@triton.jit
def whole_sums(sums, odd_sums, rows: tl.constexpr, padded_dim: tl.constexpr, coding: tl.constexpr):
    """[rows, padded_dim]."""
    if coding != "none":
        sums = tl.reshape(tl.join(sums, odd_sums), (rows, padded_dim))
    return sums


@triton.jit
def attend_tile(
    query,
    odd_query,
    maximum,
    total,
    sums,
    odd_sums,
    key,
    context,
    row_position,
    table,
    head,
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

    query, odd_query: operands, from `load_queries`. sums, odd_sums: see `no_sums`.
    key: [keys], positions. row_position: [rows].
    head: whose plane of keys is read; its values are num_kv_heads planes on. numbers: as they are loaded.
    is_masked: not all keys are seen by all rows, or there are fewer.
    """
    # Of codes, pairs are loaded: shared memory gives products their operands by 16 bits, not by bytes.
    per_load: tl.constexpr = 1 if coding == "none" else 2
    width: tl.constexpr = head_dim // per_load
    dims = tl.arange(0, padded_dim // per_load)
    is_dim = dims[None, :] < width
    is_key = key < context
    offset = key % block_size
    if is_masked:
        block = tl.load(table + key // block_size, mask=is_key, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // block_size).to(tl.int64)
    plane = head * block_size
    place = (block * block_stride + (plane + offset) * width)[:, None] + dims[None, :]
    value_plane: tl.constexpr = num_kv_heads * block_size
    if is_masked:
        is_read = is_key[:, None] & is_dim
        keys = tl.load(numbers + place, mask=is_read, other=0)
        values = tl.load(numbers + value_plane * width + place, mask=is_read, other=0)
    elif head_dim != padded_dim:
        keys = tl.load(numbers + place, mask=is_dim, other=0)
        values = tl.load(numbers + value_plane * width + place, mask=is_dim, other=0)
    else:
        keys = tl.load(numbers + place)
        values = tl.load(numbers + value_plane * width + place)

    scores = tl.zeros((query.shape[0], key.shape[0]), dtype=tl.float32)
    if coding == "none":
        scores = dot(query, tl.trans(keys.to(operand)), scores)
    else:
        even_keys, odd_keys = unpacked(keys, coding, operand)
        scores = dot(query, tl.trans(even_keys), scores)
        scores = dot(odd_query, tl.trans(odd_keys), scores)
    code_unit: tl.constexpr = 256.0 if coding == "fp8_bits" else 1.0
    if coding != "none":
        scale_place = block * scale_block_stride + plane + offset
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
        sums = dot(weights.to(operand), values.to(operand), sums)
    else:
        largest = tl.max(value_scale, 0)
        weights = (weights * (value_scale / tl.maximum(largest, LEAST_SCALE))[None, :]).to(operand)
        even_values, odd_values = unpacked(values, coding, operand)
        none = tl.zeros((query.shape[0], padded_dim // 2), dtype=tl.float32)
        sums += dot(weights, even_values, none) * (largest * code_unit)
        odd_sums = odd_sums * shrink[:, None] + dot(weights, odd_values, none) * (largest * code_unit)
    return new_maximum, total, sums, odd_sums
