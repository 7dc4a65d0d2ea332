"""One token of each row of logits: the likeliest, or a draw by seed and position, that of `draws.py`.

What is drawn, and why it is right, stands there. Here a program has a row, and what it needs of the row are
its blocks' numbers (see `vocabulary.py`), in registers; logits are read again only where they decide:

- The likeliest token, and a draw without filters, read one block more (0.8 KB of 257).
- Bounds (min-p, top-k, and the token that top-p rejects) leave out whole blocks by their largest logits; only
  what is left is read, and the sums of its blocks are kept in `kept_pointer`.
- top-k: the k-th largest of the blocks' largest logits is a bound that at least k tokens reach. Those that do
  are written side by side, few more than k, and of these the k-th is found bit by bit, without sorting. Where
  they are more than fit (k above the number of blocks, or rows of equals) bits are found by passes over the
  row.

Filters and parameters are each row's own and looked up on the device, so that one captured launch serves
every mixture of requests, greedy ones as well.

Measured on an H200, vocabularies of 128,256 whose probabilities go as rank to the power of -1.2: 4 us for
greedy rows and draws without filters, of 1 row and of 32; 26 us with top-p 0.9 of one row and 150 of 32; 215
us with top-k 50, which is more than the 6 to 12 us expected of a few tiles that are read. Blocks' numbers
before it take 5 us of one row and 14 of 32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.kth_largest import kth_largest_of_row
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import launched_early, let_next_begin, wait_for_last
from headway_runtime.kernels.triton.vocabulary import (
    BlockNumbers,
    block_numbers,
    divisor,
    exponentials,
    hashes_of,
    mixed,
    scaled,
    split_mixed,
    tile_of,
    weights_of,
)

# Numbers among which the k-th largest is looked for in registers.
NUM_CANDIDATES = 4096


@triton.jit
def keep_sums(
    row_pointer,
    tops_pointer,
    kept_pointer,
    temperature,
    top,
    floor,
    pivot,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Leaves the sums of blocks' weights of logits from `floor` on and above `pivot`; returns their sum."""
    total = 0.0
    for first in range(0, NUM_BLOCKS, TILE_BLOCKS):
        blocks = first + tl.arange(0, TILE_BLOCKS)
        is_block = blocks < NUM_BLOCKS
        tops = tl.load(tops_pointer + blocks, mask=is_block, other=float("-inf"))
        highest = tl.max(tops, 0)
        sums = tl.zeros((TILE_BLOCKS,), tl.float32)
        if (highest >= floor) & (highest > pivot):
            for start in range(0, BLOCK_SIZE, TILE):
                columns = start + tl.arange(0, TILE)
                x = scaled(row_pointer, blocks, columns, temperature, NUM_BLOCKS, BLOCK_SIZE)
                is_kept = (x >= floor) & (x > pivot)
                sums += tl.sum(tl.where(is_kept, weights_of(x, top), 0.0), 1)
            total += tl.sum(sums, 0)
        tl.store(kept_pointer + blocks, sums, mask=is_block)
    tl.debug_barrier()
    return total


@triton.jit
def first_in_block(
    row_pointer,
    block,
    temperature,
    top,
    floor,
    pivot,
    key,
    is_greedy,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of a block that wins the race of those kept, or has the largest logit; its logit, too."""
    winner, winner_time, winner_logit = -1, -1.0, float("-inf")
    for start in range(0, BLOCK_SIZE, TILE):
        columns = start + tl.arange(0, TILE)
        x = tl.reshape(
            scaled(
                row_pointer, block + tl.zeros((1,), tl.int32), columns, temperature, NUM_BLOCKS, BLOCK_SIZE
            ),
            (TILE,),
        )
        tokens = block * BLOCK_SIZE + columns
        is_kept = (x >= floor) & (x > pivot) & (columns < BLOCK_SIZE)
        times = weights_of(x, top) / tl.where(is_greedy, 1.0, exponentials(hashes_of(tokens) ^ key))
        times = tl.where(is_kept, times, -1.0)
        best = tl.max(times, 0)
        if best > winner_time:
            place = tl.argmax(times, 0)
            winner = block * BLOCK_SIZE + start + place
            winner_time = best
            winner_logit = tl.max(tl.where(columns == start + place, x, float("-inf")), 0)
    return winner, winner_logit


@triton.jit
def draw_kernel(
    logits_pointer,
    place_pointer,
    tops_pointer,
    sums_pointer,
    kept_pointer,
    candidates_pointer,
    temperature_pointer,
    top_k_pointer,
    top_p_pointer,
    min_p_pointer,
    seed_pointer,
    position_pointer,
    token_pointer,
    row_stride,
    READS_PLACES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One program per row. READS_PLACES: logits, too, are found by the places of tokens."""
    let_next_begin(overlaps)
    wait_for_last(overlaps)
    index = tl.program_id(0)
    place = index.to(tl.int64)
    if place_pointer is not None:
        place = tl.load(place_pointer + index).to(tl.int64)
    row = place if READS_PLACES else index.to(tl.int64)
    row_pointer = logits_pointer + row * row_stride
    tops_pointer += index * NUM_BLOCKS
    kept_pointer += index * NUM_BLOCKS
    candidates_pointer += index * CANDIDATES
    told = tl.load(temperature_pointer + index)
    temperature = divisor(told)
    every = tl.arange(0, ALL_BLOCKS)
    is_block = every < NUM_BLOCKS
    tops = tl.load(tops_pointer + every, mask=is_block, other=float("-inf"))
    top = tl.max(tops, 0)
    token = -1
    if tl.abs(top) < float("inf"):
        is_greedy = told < 1e-5
        seed = tl.load(seed_pointer + index + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
        position = tl.load(position_pointer + index + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
        key = (split_mixed(seed + position) >> 32).to(tl.uint32)
        block_hashes = hashes_of(NUM_BLOCKS * BLOCK_SIZE + every)
        floor, pivot, top_p = float("-inf"), float("-inf"), 1.0
        sums = tl.load(sums_pointer + index * NUM_BLOCKS + every, mask=is_block, other=0.0)
        if is_greedy:
            floor = top
            sums = tl.where(tops == top, 1.0, 0.0)
        else:
            sums = sums * weights_of(tops, top)
            top_p = tl.load(top_p_pointer + index)
            min_p = tl.load(min_p_pointer + index)
            if min_p > 0.0:
                floor = top + tl.log(min_p)
            k = tl.load(top_k_pointer + index)
            if (k > 0) & (k < NUM_BLOCKS * BLOCK_SIZE):
                kth = kth_largest_of_row(
                    row_pointer,
                    tops_pointer,
                    candidates_pointer,
                    temperature,
                    k,
                    NUM_BLOCKS,
                    BLOCK_SIZE,
                    TILE_BLOCKS,
                    TILE,
                    ALL_BLOCKS,
                    CANDIDATES,
                )
                floor = tl.maximum(floor, kth)
        total = tl.sum(sums, 0)
        wanted = top_p * total
        attempt, is_drawing = 0, True
        # Before the first attempt what bounds keep is summed up, after it what is likelier than its token.
        has_bound = (floor > float("-inf")) & (told >= 1e-5)
        while is_drawing:
            if has_bound:
                total = keep_sums(
                    row_pointer,
                    tops_pointer,
                    kept_pointer,
                    temperature,
                    top,
                    floor,
                    pivot,
                    NUM_BLOCKS,
                    BLOCK_SIZE,
                    TILE_BLOCKS,
                    TILE,
                )
                sums = tl.load(kept_pointer + every, mask=is_block, other=0.0)
            if attempt == 0:
                wanted = top_p * total
            # The likeliest one is always in, even if p rounds to nothing.
            if (attempt == 0) | ((total >= wanted) & (total > 0.0)):
                times = sums / tl.where(is_greedy, 1.0, exponentials(block_hashes ^ key))
                block = tl.argmax(tl.where(is_block, times, -1.0), 0)
                token, pivot = first_in_block(
                    row_pointer,
                    block,
                    temperature,
                    top,
                    floor,
                    pivot,
                    key,
                    is_greedy,
                    NUM_BLOCKS,
                    BLOCK_SIZE,
                    TILE,
                )
                attempt += 1
                step = attempt + tl.zeros((1,), tl.int32)
                key = mixed(key + step.to(tl.uint32, bitcast=True) * 0x1E3779B1)
                has_bound = top_p < 1.0
                is_drawing = top_p < 1.0
            else:
                is_drawing = False
    tl.store(token_pointer + place, token)


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Of each row that is chosen from, on the device.

    places: int32, where in the batch they belong; None: in order. temperatures: float32, below 1e-5 greedy.
    top_k: int32, 0 for all. top_p, min_p: float32. seeds: int64, `draws.split_mix` of the requests' seeds.
    positions: int64, of the tokens to be drawn.
    """

    places: Tensor | None
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def draw(
    logits: Tensor, parameters: DrawParameters, tokens: Tensor, block_size: int, *, reads_places: bool
) -> BlockNumbers:
    """Writes a token of each row to its place in `tokens` (int64), -1 where logits are not finite.

    logits: [rows, vocabulary], not changed. reads_places: whether they are found at the places of tokens;
    else they are in the order of the parameters. block_size: that of `draws.Drawer`.
    """
    rows = parameters.places if reads_places else None
    numbers = block_numbers(logits, rows, parameters.temperatures, block_size)
    num_rows, num_blocks = numbers.tops.shape
    if num_rows == 0:
        return numbers
    device = logits.device
    kept = torch.empty_like(numbers.sums)
    candidates = torch.empty((num_rows, NUM_CANDIDATES), dtype=torch.float32, device=device)
    gpu = gpu_of(device)
    values = configuration("draw", DEFAULT, gpu)
    tile_blocks, columns = tile_of(block_size, values.pop("TILE"))
    draw_kernel[(num_rows,)](
        logits,
        parameters.places,
        numbers.tops,
        numbers.sums,
        kept,
        candidates,
        parameters.temperatures,
        parameters.top_k,
        parameters.top_p,
        parameters.min_p,
        parameters.seeds,
        parameters.positions,
        tokens,
        logits.stride(0),
        READS_PLACES=reads_places,
        NUM_BLOCKS=num_blocks,
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=tile_blocks,
        TILE=columns,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        CANDIDATES=NUM_CANDIDATES,
        **values,
        **launched_early(gpu),
    )
    return numbers


def _cases() -> list[CompileCase]:
    """Vocabularies of Llama 3 and Qwen 3, in bfloat16 and as edited."""
    cases = []
    for one in configurations("draw"):
        constants, options = split_options(one.values)
        tile = constants.pop("TILE")
        # The second from 9.0 on alone: compiling one takes seconds.
        for stored, num_blocks, block_size in (("bf16", 334, 384), ("fp32", 128, 1187)):
            tile_blocks, columns = tile_of(block_size, tile)
            signature = {
                "logits_pointer": f"*{stored}",
                "place_pointer": "*i32",
                "top_k_pointer": "*i32",
                "seed_pointer": "*i64",
                "position_pointer": "*i64",
                "token_pointer": "*i64",
                "row_stride": "i32:16",
            }
            numbers = ("tops", "sums", "kept", "candidates", "temperature", "top_p", "min_p")
            signature |= {f"{name}_pointer": "*fp32" for name in numbers}
            cases.append(
                CompileCase(
                    f"{one.label} {stored} {num_blocks}x{block_size}",
                    draw_kernel,
                    signature,
                    {
                        "READS_PLACES": stored != "fp32",
                        "NUM_BLOCKS": num_blocks,
                        "BLOCK_SIZE": block_size,
                        "TILE_BLOCKS": tile_blocks,
                        "TILE": columns,
                        "ALL_BLOCKS": triton.next_power_of_2(num_blocks),
                        "CANDIDATES": NUM_CANDIDATES,
                    },
                    options,
                    one.capabilities if stored == "bf16" else tuple(c for c in one.capabilities if c >= 90),
                )
            )
    return cases


COMPILED = _cases()
