"""What requests do to the model's logits, in one pass: biases, penalties, and what is forbidden.

What is done, and in which order, is said in `logit_edits.py`. Rows that are edited are copied to float32; all
others are left where they are. Of a copied row most numbers only meet the mask, a bit per token; the few
tokens with a bias or a penalty follow as entries, each token once, and replace what was copied:

    v = logit + bias;  v / repetition if v > 0 else v * repetition;  v - count * frequency;  v - presence

the last three of tokens that occur (count >= 0), the very last of those in the answer (count > 0). A stop
token that is forbidden for now has a bias of -inf.

Counts are the host's. Where the step before still runs, one token of a row is known to the device alone: the
kernel looks it up among what that step has sampled, and counts it once more than the host does.

Bytes: a row of n bfloat16, 2n + n / 8 read and 4n written, 0.8 MB for 128,256 tokens, 0.2 us of an H200's
bandwidth; a program has 4,096 tokens and looks through the row's entries (12 bytes each, mostly in the L2
cache) for its own. Expected: 4 us for one row with some hundred entries, 70 us for 256 rows, 80% of copy
bandwidth.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.codes import EXACT
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)


@triton.jit
def is_allowed(mask_pointer, mask_row, tokens, is_real, words):
    """Bits of a row of the mask, lowest first in words of 32; all set for rows without one."""
    has_mask = (mask_row + tl.zeros_like(tokens)) >= 0
    word = tl.load(
        mask_pointer + mask_row.to(tl.int64) * words + (tokens >> 5), mask=is_real & has_mask, other=-1
    )
    return ((word >> (tokens & 31)) & 1) != 0


@triton.jit
def edited_values(value, count, repetition, frequency, presence):
    """Logits with their bias, penalized where they occur."""
    divided = tl.div_rn(value, repetition + tl.zeros_like(value))
    penalized = tl.where(value > 0.0, divided, value * repetition)
    penalized -= count * frequency
    penalized -= tl.where(count > 0.0, presence, 0.0)
    return tl.where(count >= 0.0, penalized, value)


@triton.jit
def edit_kernel(
    logits_pointer,
    out_pointer,
    place_pointer,
    mask_row_pointer,
    mask_pointer,
    start_pointer,
    entry_token_pointer,
    entry_bias_pointer,
    entry_count_pointer,
    penalty_pointer,
    unread_place_pointer,
    sampled_pointer,
    row_stride,
    vocab_size,
    words,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Programs: (row, BLOCK tokens)."""
    row = tl.program_id(0)
    first_token = tl.program_id(1) * BLOCK
    source = logits_pointer + tl.load(place_pointer + row).to(tl.int64) * row_stride
    target = out_pointer + row.to(tl.int64) * vocab_size
    mask_row = tl.load(mask_row_pointer + row)
    tokens = first_token + tl.arange(0, BLOCK)
    is_real = tokens < vocab_size
    x = tl.load(source + tokens, mask=is_real, other=0.0).to(tl.float32)
    is_free = is_allowed(mask_pointer, mask_row, tokens, is_real, words)
    tl.store(target + tokens, tl.where(is_free, x, float("-inf")), mask=is_real)
    # What follows replaces what other threads have stored.
    tl.debug_barrier()
    repetition = tl.load(penalty_pointer + 3 * row)
    frequency = tl.load(penalty_pointer + 3 * row + 1)
    presence = tl.load(penalty_pointer + 3 * row + 2)
    # The token that the host has not read yet; none is -1, which is no token's number.
    unread_place = tl.load(unread_place_pointer + row + tl.arange(0, 1))
    sampled = tl.load(sampled_pointer + tl.maximum(unread_place, 0)).to(tl.int32)
    unread = tl.where(unread_place >= 0, sampled, -1)
    is_listed = tl.zeros((1,), tl.int32)
    end = tl.load(start_pointer + row + 1)
    for start in range(tl.load(start_pointer + row), end, ENTRIES):
        places = start + tl.arange(0, ENTRIES)
        token = tl.load(entry_token_pointer + places, mask=places < end, other=-1)
        is_own = (token >= first_token) & (token < first_token + BLOCK)
        value = tl.load(source + token, mask=is_own, other=0.0).to(tl.float32)
        value += tl.load(entry_bias_pointer + places, mask=is_own, other=0.0)
        count = tl.load(entry_count_pointer + places, mask=is_own, other=-1.0)
        is_unread = (token == unread) & (token >= 0)
        is_listed = tl.maximum(is_listed, tl.max(is_unread.to(tl.int32), 0))
        count = tl.where(is_unread, tl.maximum(count, 0.0) + 1.0, count)
        value = edited_values(value, count, repetition, frequency, presence)
        allowed = is_allowed(mask_pointer, mask_row, token, is_own, words)
        tl.store(target + token, tl.where(allowed, value, float("-inf")), mask=is_own)
    # It may be none of the entries.
    is_own = (is_listed == 0) & (unread >= first_token) & (unread < first_token + BLOCK)
    value = tl.load(source + unread, mask=is_own, other=0.0).to(tl.float32)
    value = edited_values(value, tl.full((1,), 1.0, tl.float32), repetition, frequency, presence)
    allowed = is_allowed(mask_pointer, mask_row, unread, is_own, words)
    tl.store(target + unread, tl.where(allowed, value, float("-inf")), mask=is_own)


@dataclass(frozen=True, slots=True)
class EditedRows:
    """What is done to some rows, on the device; all of 32 bits.

    places: int32 [rows], of the logits that are copied.
    mask_rows: int32 [rows], the row of `masks`, -1: none. masks: int32 [masks, words].
    starts: int32 [rows + 1], of each row's entries, and their end.
    tokens: int32. biases, counts: float32, of each entry; a count below 0: not penalized.
    penalties: float32 [rows, 3], repetition, frequency, presence.
    unread_places: int32 [rows], where in `sampled` (int64, -1 for none) the latest token of a row that is
        penalized is, if `counts` are without it; -1: they are with it.
    """

    places: Tensor
    mask_rows: Tensor
    masks: Tensor
    starts: Tensor
    tokens: Tensor
    biases: Tensor
    counts: Tensor
    penalties: Tensor
    unread_places: Tensor
    sampled: Tensor


def edited(logits: Tensor, rows: EditedRows) -> Tensor:
    """Float32 copies of those rows of logits [any, vocabulary], edited: [rows, vocabulary]."""
    num_rows, vocab_size = len(rows.places), logits.shape[1]
    assert logits.stride(1) == 1
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out
    values = configuration("edit_logits", DEFAULT, gpu_of(logits.device))
    edit_kernel[(num_rows, triton.cdiv(vocab_size, values["BLOCK"]))](
        logits,
        out,
        rows.places,
        rows.mask_rows,
        rows.masks,
        rows.starts,
        rows.tokens,
        rows.biases,
        rows.counts,
        rows.penalties,
        rows.unread_places,
        rows.sampled,
        logits.stride(0),
        vocab_size,
        rows.masks.shape[1],
        **values,
        **EXACT,
    )
    return out


def edited_by_torch(logits: Tensor, rows: EditedRows) -> Tensor:
    """The reference."""
    out = logits[rows.places.long()].float()
    for row, own in enumerate(out):
        first, end = rows.starts[row : row + 2].tolist()
        tokens, counts = rows.tokens[first:end].long(), rows.counts[first:end]
        biases, place = rows.biases[first:end], int(rows.unread_places[row])
        unread = -1 if place < 0 else int(rows.sampled[place])
        is_unread = tokens == unread
        counts = torch.where(is_unread, counts.clamp_min(0.0) + 1.0, counts)
        if unread >= 0 and not bool(is_unread.any()):
            tokens = torch.cat((tokens, tokens.new_tensor([unread])))
            counts = torch.cat((counts, counts.new_tensor([1.0])))
            biases = torch.cat((biases, biases.new_tensor([0.0])))
        repetition, frequency, presence = rows.penalties[row]
        values = own[tokens] + biases
        penalized = torch.where(values > 0.0, values / repetition, values * repetition)
        penalized = penalized - counts * frequency - (counts > 0.0) * presence
        own[tokens] = torch.where(counts >= 0.0, penalized, values)
        mask_row = int(rows.mask_rows[row])
        if mask_row >= 0:
            every = torch.arange(len(own), device=own.device)
            bits = rows.masks[mask_row].long()[every >> 5] >> (every & 31)
            own.masked_fill_((bits & 1) == 0, float("-inf"))
    return out


def _cases() -> list[CompileCase]:
    cases = []
    for one in configurations("edit_logits"):
        constants, options = split_options(one.values)
        pointers = {
            "place": "*i32",
            "mask_row": "*i32",
            "mask": "*i32",
            "start": "*i32",
            "entry_token": "*i32",
        }
        pointers |= {"entry_bias": "*fp32", "entry_count": "*fp32", "penalty": "*fp32"}
        pointers |= {"unread_place": "*i32", "sampled": "*i64", "logits": "*bf16", "out": "*fp32"}
        signature = {f"{name}_pointer": kind for name, kind in pointers.items()}
        signature |= {"row_stride": "i32:16", "vocab_size": "i32:16", "words": "i32"}
        cases.append(
            CompileCase(one.label, edit_kernel, signature, constants, {**options, **EXACT}, one.capabilities)
        )
    return cases


COMPILED = _cases()
