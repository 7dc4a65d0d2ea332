"""The edits of `logit_edits.py` for rows whose logits are on a GPU: said by the host, done by one kernel.

What is the same in every step is laid out once. Each step adds how often tokens occur and what grammars
allow, and all of it crosses to the device in one copy. A token that the step before samples, and that the
host has not read, the kernel finds where that step leaves it. Nothing comes back: whether a mask leaves a row
without any token is seen in its bits, before they are sent.
"""

import math
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.batch import Chunk
from headway_runtime.kernels.triton.edit_logits import EditedRows, edited
from headway_runtime.logit_edits import is_penalized
from headway_runtime.occurrences import OccurrenceCounters
from headway_runtime.token_feed import TokenFeed
from headway_runtime.token_masks import BITS_OF_WORD, TokenMasks, Unsatisfiable, forbids_stops, is_masked

Floats = NDArray[numpy.float32]
Integers = NDArray[numpy.int64]
# Kernels are compiled once for addresses that this divides, and once more for each that it does not.
ALIGNED_BYTES = 16
# Of an entry whose token does not occur.
NOT_PENALIZED = -1.0
# Of a row whose tokens the host knows, or that is not penalized.
NOT_UNREAD = -1
CPU = torch.device("cpu")


class DeviceEdits:
    """The edits of some rows. chunks: of all of them. places: where in the batch they are."""

    def __init__(
        self, chunks: Sequence[Chunk], places: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._device = device
        self._num_words = -(-vocab_size // BITS_OF_WORD)
        params = [chunk.sampling for chunk in chunks]
        self._is_penalized = [is_penalized(one) for one in params]
        self._biases = [_biases(chunk, vocab_size) for chunk in chunks]
        masked = [row for row, one in enumerate(params) if is_masked(one)]
        self._masks = TokenMasks(chunks, masked, vocab_size, CPU) if masked else None
        mask_rows = numpy.full(len(chunks), -1, dtype=numpy.int32)
        mask_rows[masked] = numpy.arange(len(masked))
        penalties = numpy.array(
            [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params],
            dtype=numpy.float32,
        )
        self._fixed = (numpy.array(places, dtype=numpy.int32), mask_rows, penalties.view(numpy.int32))

    def apply(
        self,
        logits: Tensor,
        chunks: Sequence[Chunk],
        counters: OccurrenceCounters,
        feed: TokenFeed | None = None,
    ) -> tuple[Tensor, dict[int, Unsatisfiable]]:
        """Float32 copies of the rows, edited [rows, vocab_size]; and which are left without any token.

        logits: of the whole batch. chunks: of the rows, as they are now. feed: of the tokens that they end in
        and the host has not read; None: there is none.
        """
        masks = numpy.zeros((0, self._num_words), dtype=numpy.int32)
        problems: dict[int, Unsatisfiable] = {}
        if self._masks is not None:
            masks, problems = self._masks.bits(chunks)
        entries = [
            _entries(biases, counters.count(chunk) if penalized else None)
            for chunk, biases, penalized in zip(chunks, self._biases, self._is_penalized, strict=True)
        ]
        tokens, biases, counts = (numpy.concatenate(parts) for parts in zip(*entries, strict=True))
        starts = numpy.cumsum([0, *(len(own) for own, _, _ in entries)])
        unread_places, sampled = self._unread(chunks, feed, logits)
        parts = [
            *self._fixed,
            unread_places,
            masks,
            starts.astype(numpy.int32),
            tokens.astype(numpy.int32),
            biases.view(numpy.int32),
            counts.view(numpy.int32),
        ]
        places, mask_rows, penalties, unread, mask_words, first, own, added, number = uploaded(
            parts, self._device
        )
        rows = EditedRows(
            places,
            mask_rows,
            mask_words,
            first,
            own,
            added.view(torch.float32),
            number.view(torch.float32),
            penalties.view(torch.float32),
            unread,
            sampled,
        )
        return edited(logits, rows), problems

    def _unread(
        self, chunks: Sequence[Chunk], feed: TokenFeed | None, logits: Tensor
    ) -> tuple[NDArray[numpy.int32], Tensor]:
        """Of each row, where its latest token is among what the step before has sampled; and that."""
        places = numpy.full(len(chunks), NOT_UNREAD, dtype=numpy.int32)
        sampled = None if feed is None else feed.tokens
        if feed is None or sampled is None:
            return places, logits.new_empty(1, dtype=torch.int64)
        for row, place in feed.sources(chunks).items():
            if self._is_penalized[row]:
                places[row] = place
        return places, sampled


def uploaded(parts: Sequence[NDArray[numpy.int32]], device: torch.device) -> list[Tensor]:
    """All parts in one copy, each as it is shaped, and aligned."""
    starts, size = [], 0
    for part in parts:
        starts.append(size)
        size += -(-part.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES // part.itemsize
    flat = transfers.host_memory(size, torch.int32, device)
    host = flat.numpy()
    for start, part in zip(starts, parts, strict=True):
        host[start : start + part.size] = part.reshape(-1)
    flat = transfers.sent(flat, device)
    return [
        flat[start : start + part.size].view(part.shape) for start, part in zip(starts, parts, strict=True)
    ]


def _biases(chunk: Chunk, vocab_size: int) -> dict[int, float]:
    """What is added to tokens' logits for as long as the plan holds; -inf to stop tokens that are
    forbidden."""
    biases = {token: bias for token, bias in chunk.sampling.logit_bias if token < vocab_size}
    if forbids_stops(chunk) and not is_masked(chunk.sampling):
        biases.update({token: -math.inf for token in chunk.sampling.stop_token_ids if token < vocab_size})
    return biases


def _entries(
    biases: dict[int, float], counted: tuple[Integers, Floats] | None
) -> tuple[Integers, Floats, Floats]:
    """Tokens, each once, what is added to their logits, and how often they occur."""
    added = numpy.array(list(biases.values()), dtype=numpy.float32)
    own = numpy.array(list(biases), dtype=numpy.int64)
    if counted is None:
        return own, added, numpy.full(len(own), NOT_PENALIZED, dtype=numpy.float32)
    tokens, counts = counted
    if not biases:
        return tokens, numpy.zeros(len(tokens), dtype=numpy.float32), counts
    of_tokens = numpy.array([biases.get(token, 0.0) for token in tokens.tolist()], dtype=numpy.float32)
    is_other = numpy.isin(own, tokens, invert=True)
    rest = numpy.full(int(is_other.sum()), NOT_PENALIZED, dtype=numpy.float32)
    return (
        numpy.concatenate([tokens, own[is_other]]),
        numpy.concatenate([of_tokens, added[is_other]]),
        numpy.concatenate([counts, rest]),
    )
