"""Which rows go to which expert: the choice of experts, and rows in the order of theirs, cut into tiles.

A slot is one of a row's choices. Nothing here depends on how many slots an expert gets, so that a step can be
captured: there are always as many tiles as there could be, and those past the last are nobody's. Floor: the
slots are some kilobytes, so each launch is one program's latency, some 3 us; each expert's program counts the
slots of all experts by itself and waits for no other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.launch import (
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)

CHOICE_KERNEL, ORDER_KERNEL = "expert_choice", "expert_order"
CANDIDATES = {
    CHOICE_KERNEL: [{"num_warps": warps} for warps in (1, 2, 4)],
    ORDER_KERNEL: [{"SLOTS": slots, "num_warps": warps} for slots in (256, 1024) for warps in (4, 8)],
}
# Fields of a tile: its expert (-1: none), its first place in the order, and the end of its expert's.
TILE_FIELDS = 3
NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """order: int32 [slots], those of the first expert first, in their own order.

    tiles: int32 [3, tiles]: expert or -1, first place, end of the expert's places.
    """

    order: Tensor
    tiles: Tensor


@triton.jit
def expert_choice_kernel(
    logits,
    weights,
    chosen,
    num_experts,
    stride,
    NUM_USED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    EXPERTS: tl.constexpr,
    USED: tl.constexpr,
):
    """Grid: rows. The most probable experts, of equals the first. EXPERTS, USED: powers of two of no less.

    A row of which no probabilities come (of NaN, of infinity) has the first experts, by weights that are NaN.
    """
    row = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    places = tl.arange(0, USED)
    is_expert = experts < num_experts
    own = tl.load(logits + row * stride + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    powers = tl.exp(own - tl.max(own, axis=0))
    total = tl.sum(powers, axis=0)
    # The largest power is 1, and nothing compares with NaN. NaN equals no expert's, so none would be found.
    is_number = total > 0.0
    left = tl.where(is_expert, tl.where(is_number, powers / total, 0.0), -1.0)
    found = tl.zeros([USED], tl.float32)
    numbers = tl.zeros([USED], tl.int32)
    for place in range(NUM_USED):
        most = tl.max(left, axis=0)
        first = tl.min(tl.where(left == most, experts, EXPERTS), axis=0)
        found = tl.where(places == place, most, found)
        numbers = tl.where(places == place, first, numbers)
        left = tl.where(experts == first, -2.0, left)
    if NORMALIZES:
        found = found / tl.sum(found, axis=0)
    found = tl.where(is_number, found, float("nan"))
    is_used = places < NUM_USED
    tl.store(weights + row * NUM_USED + places, found, mask=is_used)
    tl.store(chosen + row * NUM_USED + places, numbers, mask=is_used)


# What changes from step to step makes no new kernel.
@triton.jit(do_not_specialize=["num_slots", "num_tiles", "tile_rows"])
def expert_order_kernel(
    chosen,
    order,
    tiles,
    num_slots,
    num_experts,
    num_tiles,
    tile_rows,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Grid: experts. EXPERTS: a power of two of more than there are. SLOTS: read at once."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    slots = tl.arange(0, SLOTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_slots, SLOTS):
        own = tl.load(chosen + first + slots, mask=first + slots < num_slots, other=num_experts)
        counts += tl.histogram(own, EXPERTS)
    counts = tl.where(experts < num_experts, counts, 0)
    of_experts = (counts + tile_rows - 1) // tile_rows
    before = experts < expert
    place = tl.sum(tl.where(before, counts, 0), axis=0)
    tile = tl.sum(tl.where(before, of_experts, 0), axis=0)
    end = place + tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    for first in range(place, end, tile_rows):
        tl.store(tiles + tile, expert)
        tl.store(tiles + num_tiles + tile, first)
        tl.store(tiles + 2 * num_tiles + tile, end)
        tile += 1
    # The last expert's program has all tiles before it.
    if expert == num_experts - 1:
        for first in range(tile, num_tiles):
            tl.store(tiles + first, -1)
    for first in range(0, num_slots, SLOTS):
        own = tl.load(chosen + first + slots, mask=first + slots < num_slots, other=num_experts)
        is_own = (own == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, axis=0) - 1, first + slots, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)


def choose_experts(logits: Tensor, num_used: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """logits: [rows, experts]. Weights in float32 and experts in int32: each [rows, num_used]."""
    num_rows, num_experts = logits.shape
    weights = torch.empty((num_rows, num_used), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_rows, num_used), dtype=torch.int32, device=logits.device)
    if num_rows:
        _, options = split_options(configuration(CHOICE_KERNEL, str(num_experts), gpu_of(logits.device)))
        expert_choice_kernel[(num_rows,)](
            logits,
            weights,
            chosen,
            num_experts,
            logits.stride(0),
            NUM_USED=num_used,
            NORMALIZES=normalizes,
            EXPERTS=triton.next_power_of_2(num_experts),
            USED=triton.next_power_of_2(num_used),
            **options,
        )
    return weights, chosen


def most_tiles(num_slots: int, num_experts: int, tile_rows: int) -> int:
    """No choice of experts needs more."""
    return min(num_slots, num_slots // tile_rows + num_experts)


def expert_order(chosen: Tensor, num_experts: int, tile_rows: int) -> ExpertOrder:
    """chosen: int32 [rows, num_used]."""
    num_slots = chosen.numel()
    num_tiles = most_tiles(num_slots, num_experts, tile_rows)
    order = torch.empty(num_slots, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((TILE_FIELDS, num_tiles), dtype=torch.int32, device=chosen.device)
    if num_slots:
        constants, options = split_options(
            configuration(ORDER_KERNEL, str(num_experts), gpu_of(chosen.device))
        )
        expert_order_kernel[(num_experts,)](
            chosen,
            order,
            tiles,
            num_slots,
            num_experts,
            num_tiles,
            tile_rows,
            EXPERTS=_bins(num_experts),
            **constants,
            **options,
        )
    return ExpertOrder(order, tiles)


def _bins(num_experts: int) -> int:
    """One more than experts at least, for what is no slot."""
    return max(32, 1 << num_experts.bit_length())


def choice_reference(logits: Tensor, num_used: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """The same by torch, whose topk takes any of equals."""
    probabilities = logits.softmax(-1, dtype=torch.float32)
    weights, chosen = (
        part[:, :num_used] for part in probabilities.sort(dim=-1, descending=True, stable=True)
    )
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen.to(torch.int32)


def order_reference(chosen: Tensor) -> Tensor:
    return chosen.flatten().argsort(stable=True).to(torch.int32)


def _cases() -> Iterator[CompileCase]:
    for one in configurations(CHOICE_KERNEL):
        _, options = split_options(one.values)
        for num_experts in (8, 128):
            yield CompileCase(
                f"{one.label} {num_experts}",
                expert_choice_kernel,
                {
                    "logits": "*bf16",
                    "weights": "*fp32",
                    "chosen": "*i32",
                    "num_experts": "i32",
                    "stride": "i32",
                },
                {"NUM_USED": 2, "NORMALIZES": True, "EXPERTS": num_experts, "USED": 2},
                options,
                one.capabilities,
            )
    for one in configurations(ORDER_KERNEL):
        constants, options = split_options(one.values)
        signature = dict.fromkeys(("chosen", "order", "tiles"), "*i32")
        signature |= dict.fromkeys(("num_slots", "num_experts", "num_tiles", "tile_rows"), "i32")
        yield CompileCase(
            one.label,
            expert_order_kernel,
            signature,
            {"EXPERTS": 256, **constants},
            options,
            one.capabilities,
        )


COMPILED = list(_cases())
