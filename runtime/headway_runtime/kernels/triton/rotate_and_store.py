"""What lies between the merged projection and attention, in one kernel: norms of heads, rotation, KV store.

Of each row of [query heads | key heads | value heads], each of head_dim numbers:

    queries and keys -> norm of each head (Qwen 3, Gemma 3), if the model has it -> rotated (halves of a
                        head are pairs; cosines and sines are the row's, so that any scaling is the table's)
    queries          -> back into the row
    keys and values  -> into the cache at the row's slot, as they are or as codes with a scale per token and
                        head (see `codes.py`)

Bytes, of one row with q query and k KV heads of d bfloat16: 2d(q + 2k) read, 2dq + 2dk (dk as codes) * 2
written, 4d of cosines and sines (from the L1 cache for all tiles of a row but one). Separate kernels (norm,
rotation, store, codes) move that three to four times. A program has 16 heads of a row: first and second
halves are two loads of 16 bytes per thread, so that the partner of a number is in the same thread's registers
and nothing is exchanged; only a head's sums and maxima are, by 8 threads of one warp.

Measured on an H200: 82% of copy bandwidth for prefill (16 programs of 4 warps, 64 KB in flight on a
multiprocessor); at decode the time of a launch, 1.7 us. The writes into blocks are of head_dim numbers
in one piece (256 bytes), rows of one sequence next to each other.
"""

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.codes import (
    EXACT,
    KEPT_CAPABILITIES,
    STORED_TYPES,
    as_bytes,
    codes_of,
    head_codes_by_torch,
    inverse_and_scale,
    kept_as,
    magnitude_bits,
)
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import launched_early, let_next_begin, wait_for_last
from headway_runtime.kernels.triton.rounding import narrow


# A kernel of its own for one token, or for sixteens of them, would be compiled while requests wait.
# Slots are single numbers, wherever a step's integers have room for them.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_pointer"])
def rotate_and_store_kernel(
    qkv_pointer,
    cosine_pointer,
    sine_pointer,
    slot_pointer,
    norm_pointer,
    numbers_pointer,
    scale_pointer,
    num_slots,
    epsilon,
    block_stride,
    scale_block_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMS: tl.constexpr,
    KEPT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Programs: (row, tile of HEADS heads). HALF: a power of two of at least half a head."""
    let_next_begin(overlaps)
    wait_for_last(overlaps)
    half_size: tl.constexpr = HEAD_DIM // 2
    num_heads: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    computed = qkv_pointer.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    is_column = columns < half_size
    is_real = (heads < num_heads)[:, None] & is_column[None, :]
    places = row * (num_heads * HEAD_DIM) + heads[:, None] * HEAD_DIM + columns[None, :]
    first = tl.load(qkv_pointer + places, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(qkv_pointer + places + half_size, mask=is_real, other=0.0).to(tl.float32)
    table = row * HEAD_DIM + columns
    cosine_first = tl.load(cosine_pointer + table, mask=is_column, other=0.0).to(tl.float32)
    cosine_second = tl.load(cosine_pointer + table + half_size, mask=is_column, other=0.0).to(tl.float32)
    sine_first = tl.load(sine_pointer + table, mask=is_column, other=0.0).to(tl.float32)
    sine_second = tl.load(sine_pointer + table + half_size, mask=is_column, other=0.0).to(tl.float32)
    slot = tl.load(slot_pointer + row, mask=row < num_slots, other=-1).to(tl.int64)
    # Of every head: the interpreter makes integers of a block of booleans and a single one.
    has_slot = (slot + tl.zeros((HEADS,), tl.int64)) >= 0

    turned_first, turned_second = first, second
    if NORMS:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse_root = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        own = norm_pointer + (heads >= QUERY_HEADS).to(tl.int32)[:, None] * HEAD_DIM + columns[None, :]
        turned_first *= inverse_root * tl.load(own, mask=is_real, other=0.0)
        turned_second *= inverse_root * tl.load(own + half_size, mask=is_real, other=0.0)
    rotated_first = turned_first * cosine_first[None, :] + turned_second * sine_first[None, :]
    rotated_second = turned_second * cosine_second[None, :] + turned_first * sine_second[None, :]
    is_value = (heads >= QUERY_HEADS + KV_HEADS)[:, None]
    first = narrow(tl.where(is_value, first, rotated_first), computed)
    second = narrow(tl.where(is_value, second, rotated_second), computed)

    is_query = (heads < QUERY_HEADS)[:, None]
    is_stored = is_real & ((heads >= QUERY_HEADS) & has_slot)[:, None]
    plane = heads - QUERY_HEADS
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = (
        numbers_pointer
        + block * block_stride
        + (plane[:, None] * BLOCK_SIZE + offset) * HEAD_DIM
        + columns[None, :]
    )
    if KEPT == "plain":
        kept = numbers_pointer.dtype.element_ty
        kept_first, kept_second = narrow(first.to(tl.float32), kept), narrow(second.to(tl.float32), kept)
        tl.store(target, kept_first, mask=is_stored)
        tl.store(target + half_size, kept_second, mask=is_stored)
    else:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        bits = tl.maximum(tl.max(magnitude_bits(wide_first), 1), tl.max(magnitude_bits(wide_second), 1))
        inverse, scale = inverse_and_scale(bits, KEPT)
        codes_first = codes_of(wide_first * inverse[:, None], KEPT)
        codes_second = codes_of(wide_second * inverse[:, None], KEPT)
        tl.store(target, codes_first, mask=is_stored)
        tl.store(target + half_size, codes_second, mask=is_stored)
        has_scale = (heads >= QUERY_HEADS) & (heads < num_heads) & has_slot
        own_scale = scale_pointer + block * scale_block_stride + plane * BLOCK_SIZE + offset
        tl.store(own_scale, scale, mask=has_scale)
    tl.store(qkv_pointer + places, first, mask=is_real & is_query)
    tl.store(qkv_pointer + places + half_size, second, mask=is_real & is_query)


class RotateAndStore:
    """The launcher for one shape of heads."""

    __slots__ = ("_block_size", "_head_dim", "_num_kv_heads", "_num_query_heads")

    def __init__(self, num_query_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        self._num_query_heads = num_query_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size

    def __call__(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        slots: Tensor,
        numbers: Tensor,
        scales: Tensor | None,
        norms: tuple[Tensor, float] | None = None,
    ) -> None:
        """qkv: contiguous [rows, all heads * head_dim]; changed.

        rotation: cosines and sines of the rows [rows, head_dim], those of the first halves negated.
        numbers: a layer's cache [blocks, 2 * kv_heads, block_size, head_dim], each block without gaps.
        scales: float32 [blocks, 2 * kv_heads, block_size]; None where there are no codes.
        norms: of heads, float32 [2, head_dim], of queries and of keys; and their epsilon.

        slots: int64, block * block_size + offset; rows without one, and those of a negative one, are stored
        nowhere.
        """
        num_heads = self._num_query_heads + 2 * self._num_kv_heads
        assert qkv.is_contiguous()
        assert qkv.shape[1] == num_heads * self._head_dim
        if len(qkv) == 0:
            return
        gpu = gpu_of(qkv.device)
        values = configuration("rotate_and_store", DEFAULT, gpu)
        kept = kept_as(numbers.dtype, gpu)
        half = triton.next_power_of_2(self._head_dim // 2)
        heads = _heads_of_tile(values.pop("TILE"), half, num_heads)
        rotate_and_store_kernel[(len(qkv), triton.cdiv(num_heads, heads))](
            qkv,
            *rotation,
            slots,
            None if norms is None else norms[0],
            as_bytes(numbers),
            scales,
            len(slots),
            0.0 if norms is None else norms[1],
            numbers.stride(0),
            0 if scales is None else scales.stride(0),
            QUERY_HEADS=self._num_query_heads,
            KV_HEADS=self._num_kv_heads,
            HEAD_DIM=self._head_dim,
            BLOCK_SIZE=self._block_size,
            NORMS=norms is not None,
            KEPT=kept,
            HEADS=heads,
            HALF=half,
            **values,
            **launched_early(gpu),
            **({} if kept == "plain" else EXACT),
        )


def _heads_of_tile(tile: int, half: int, num_heads: int) -> int:
    """How many heads a program has, of which `tile` numbers are first halves; no more than there are."""
    return max(1, min(tile // half, int(triton.next_power_of_2(num_heads))))


def rotate_and_store_by_torch(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    numbers: Tensor,
    scales: Tensor | None,
    norms: tuple[Tensor, float] | None = None,
) -> None:
    """The reference; keys and values are left in their rows as they were."""
    _, num_planes, block_size, head_dim = numbers.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    num_query_heads = heads.shape[1] - num_planes
    num_turned = num_query_heads + num_planes // 2
    turned = heads[:, :num_turned].float()
    if norms is not None:
        counts = torch.tensor([num_query_heads, num_planes // 2], device=qkv.device)
        normed = functional.rms_norm(turned, (head_dim,), None, norms[1])
        turned = normed * norms[0].repeat_interleave(counts, 0)
    cosine, sine = (part.float().unsqueeze(1) for part in rotation)
    rotated = (turned * cosine + turned.roll(head_dim // 2, -1) * sine).to(qkv.dtype)
    own = torch.cat((rotated[:, num_query_heads:], heads[:, num_turned:]), 1)
    heads[:, :num_query_heads] = rotated[:, :num_query_heads]
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        if scales is None:
            numbers[block, :, offset] = own[row].to(numbers.dtype)
        else:
            codes, scales[block, :, offset] = head_codes_by_torch(own[row], numbers.dtype)
            as_bytes(numbers)[block, :, offset] = as_bytes(codes)


def _cases() -> list[CompileCase]:
    """Heads as of Llama 3.1 and Qwen 3."""
    cases = []
    for one in configurations("rotate_and_store"):
        constants, options = split_options(one.values)
        for kept, capabilities in KEPT_CAPABILITIES.items():
            for norms, head_dim in ((False, 128), (True, 128), (True, 256)):
                half = head_dim // 2
                signature = {
                    "qkv_pointer": "*bf16",
                    "cosine_pointer": "*bf16",
                    "sine_pointer": "*bf16",
                    "slot_pointer": "*i64",
                    "numbers_pointer": STORED_TYPES[kept] or "*bf16",
                    "num_slots": "i32",
                    "epsilon": "fp32",
                    "block_stride": "i32:16",
                    "scale_block_stride": "i32:16",
                }
                absent: dict[str, object] = {}
                for name, there in (("norm_pointer", norms), ("scale_pointer", kept != "plain")):
                    if there:
                        signature[name] = "*fp32"
                    else:
                        absent[name] = None
                cases.append(
                    CompileCase(
                        f"{one.label} {kept} head_dim={head_dim}{' norms' if norms else ''}",
                        rotate_and_store_kernel,
                        signature,
                        {
                            "QUERY_HEADS": 32,
                            "KV_HEADS": 8,
                            "HEAD_DIM": head_dim,
                            "BLOCK_SIZE": 16,
                            "NORMS": norms,
                            "KEPT": kept,
                            "HEADS": _heads_of_tile(constants["TILE"], half, 48),
                            "HALF": half,
                            **absent,
                        },
                        {**options, **({} if kept == "plain" else EXACT)},
                        tuple(each for each in one.capabilities if each in capabilities),
                    )
                )
    return cases


COMPILED = _cases()
