"""Log-probabilities of tokens, their ranks, and the likeliest tokens' of each row, without sorting it.

Natural logarithms of softmax(logits), of the model's own distribution. A program has a row and its blocks'
numbers (see `vocabulary.py`): the normalizer follows from those, the token's own logit is one number, and
each of the likeliest tokens is the first with the largest logit of the block with the largest logits; that
block is then read again for the largest of what it has left. A rank is counted in the blocks that reach the
logit.

Bytes: once the row, by the kernel of blocks, then 0.8 KB per token that is asked for. Expected on an H200:
5 us without likeliest tokens, 1 us more for each of them (at most 20), whatever the rows are up to 132.
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
from headway_runtime.kernels.triton.vocabulary import block_numbers, scaled, tile_of, weights_of


@triton.jit
def largest_left(
    row_pointer,
    block,
    logit,
    token,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """A block's largest logit behind that one, in the order of logits, equals by tokens; and its token."""
    best, best_token = float("-inf"), -1
    for start in range(0, BLOCK_SIZE, TILE):
        columns = start + tl.arange(0, TILE)
        x = scaled(row_pointer, block + tl.zeros((1,), tl.int32), columns, 1.0, NUM_BLOCKS, BLOCK_SIZE)
        x = tl.reshape(x, (TILE,))
        tokens = block * BLOCK_SIZE + columns
        is_left = ((x < logit) | ((x == logit) & (tokens > token))) & (columns < BLOCK_SIZE)
        left = tl.where(is_left, x, float("-inf"))
        highest = tl.max(left, 0)
        first = tl.min(tl.where(is_left & (left == highest), tokens, 2147483647), 0)
        # A block may have nothing but -inf left.
        if (first != 2147483647) & ((highest > best) | (best_token < 0)):
            best, best_token = highest, first
    return best, best_token


@triton.jit(do_not_specialize=["num_top"])
def logprob_kernel(
    logits_pointer,
    row_pointer,
    token_pointer,
    tops_pointer,
    sums_pointer,
    chosen_pointer,
    rank_pointer,
    top_logprob_pointer,
    top_token_pointer,
    row_stride,
    num_top,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
):
    """One program per row."""
    index = tl.program_id(0)
    row = index.to(tl.int64)
    if row_pointer is not None:
        row = tl.load(row_pointer + index).to(tl.int64)
    source = logits_pointer + row * row_stride
    every = tl.arange(0, ALL_BLOCKS)
    is_block = every < NUM_BLOCKS
    tops_pointer += index * NUM_BLOCKS
    tops = tl.load(tops_pointer + every, mask=is_block, other=float("-inf"))
    sums = tl.load(sums_pointer + index * NUM_BLOCKS + every, mask=is_block, other=0.0)
    top = tl.max(tops, 0)
    token = tl.maximum(tl.load(token_pointer + row), 0).to(tl.int32)
    # A row that is not finite has no token, and nobody reads what is written for it.
    if tl.abs(top) < float("inf"):
        normalizer = top + tl.log(tl.sum(sums * weights_of(tops, top), 0))
        own = tl.load(source + token).to(tl.float32)
        tl.store(chosen_pointer + index, own - normalizer)
        if rank_pointer is not None:
            rank = 1
            for first in range(0, NUM_BLOCKS, TILE_BLOCKS):
                blocks = first + tl.arange(0, TILE_BLOCKS)
                highest = tl.load(tops_pointer + blocks, mask=blocks < NUM_BLOCKS, other=float("-inf"))
                if tl.max(highest, 0) > own:
                    for start in range(0, BLOCK_SIZE, TILE):
                        columns = start + tl.arange(0, TILE)
                        x = scaled(source, blocks, columns, 1.0, NUM_BLOCKS, BLOCK_SIZE)
                        rank += tl.sum(tl.sum((x > own).to(tl.int32), 1), 0)
            tl.store(rank_pointer + index, rank)
        # In the order of logits, equals by tokens, all up to the last one are taken.
        last, last_token = float("inf"), -1
        for place in range(num_top):
            block = tl.argmax(tops, 0)
            last, last_token = largest_left(source, block, last, last_token, NUM_BLOCKS, BLOCK_SIZE, TILE)
            tl.store(top_logprob_pointer + index * num_top + place, last - normalizer)
            tl.store(top_token_pointer + index * num_top + place, last_token)
            left, _ = largest_left(source, block, last, last_token, NUM_BLOCKS, BLOCK_SIZE, TILE)
            tops = tl.where(every == block, left, tops)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of some rows. chosen: float32 [rows]. ranks: int32 [rows], from 1; None: not asked for.

    logprobs, tokens: float32 and int32 [rows, likeliest tokens]; -1 for a token where only -inf is left.
    """

    chosen: Tensor
    ranks: Tensor | None
    logprobs: Tensor
    tokens: Tensor


def top_logprobs(
    logits: Tensor,
    rows: Tensor | None,
    tokens: Tensor,
    num_top: int,
    block_size: int,
    *,
    with_ranks: bool = False,
) -> TopLogprobs:
    """logits: [any, vocabulary]. rows: int32, which of them; None: all. tokens: int64, by rows of the logits.

    num_top: at most the vocabulary's size. block_size: a divisor of it.
    """
    numbers = block_numbers(logits, rows, None, block_size)
    num_rows, num_blocks = numbers.tops.shape
    device = logits.device
    assert num_top <= logits.shape[1]
    found = TopLogprobs(
        torch.zeros(num_rows, dtype=torch.float32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device) if with_ranks else None,
        torch.zeros((num_rows, num_top), dtype=torch.float32, device=device),
        torch.full((num_rows, num_top), -1, dtype=torch.int32, device=device),
    )
    if num_rows == 0:
        return found
    values = configuration("top_logprobs", DEFAULT, gpu_of(device))
    tile_blocks, columns = tile_of(block_size, values.pop("TILE"))
    logprob_kernel[(num_rows,)](
        logits,
        rows,
        tokens,
        numbers.tops,
        numbers.sums,
        found.chosen,
        found.ranks,
        found.logprobs,
        found.tokens,
        logits.stride(0),
        num_top,
        NUM_BLOCKS=num_blocks,
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=tile_blocks,
        TILE=columns,
        ALL_BLOCKS=triton.next_power_of_2(num_blocks),
        **values,
    )
    return found


def top_logprobs_by_torch(logits: Tensor, tokens: Tensor, num_top: int) -> TopLogprobs:
    """The reference, of all rows."""
    wide = logits.float()
    own = wide.gather(1, tokens.clamp_min(0).unsqueeze(1))
    logprobs, likeliest = wide.log_softmax(-1).topk(num_top)
    return TopLogprobs(
        (own - wide.logsumexp(-1, keepdim=True)).flatten(),
        ((wide > own).sum(-1) + 1).int(),
        logprobs,
        likeliest.int(),
    )


def _cases() -> list[CompileCase]:
    """Vocabularies of Llama 3 and Qwen 3, with ranks and without."""
    cases = []
    for one in configurations("top_logprobs"):
        constants, options = split_options(one.values)
        tile = constants.pop("TILE")
        for num_blocks, block_size, with_ranks in ((334, 384, False), (128, 1187, True)):
            tile_blocks, columns = tile_of(block_size, tile)
            signature = {"logits": "*bf16", "row": "*i32", "token": "*i64", "top_token": "*i32"}
            signature |= dict.fromkeys(("tops", "sums", "chosen", "top_logprob"), "*fp32")
            # Ranks are asked for prompts, all rows of which there are.
            signature |= {"rank": "*i32"} if with_ranks else {}
            absent = "row" if with_ranks else "rank"
            signature.pop(absent, None)
            named = {f"{name}_pointer": kind for name, kind in signature.items()}
            cases.append(
                CompileCase(
                    f"{one.label} {num_blocks}x{block_size}",
                    logprob_kernel,
                    {**named, "row_stride": "i32:16", "num_top": "i32"},
                    {
                        "NUM_BLOCKS": num_blocks,
                        "BLOCK_SIZE": block_size,
                        "TILE_BLOCKS": tile_blocks,
                        "TILE": columns,
                        "ALL_BLOCKS": triton.next_power_of_2(num_blocks),
                        f"{absent}_pointer": None,
                    },
                    options,
                    one.capabilities,
                )
            )
    return cases


COMPILED = _cases()
