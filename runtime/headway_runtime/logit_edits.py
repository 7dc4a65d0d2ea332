"""What requests do to the model's logits before tokens are chosen: biases, penalties, and what is forbidden.

In this order, as vLLM has it, on float32 copies of the rows that need it and of no others:

1. `logit_bias`: added.
2. `repetition_penalty` (Keskar et al., CTRL): logits of tokens that occur in the prompt or the answer are
   divided by it if positive, multiplied if not.
3. `frequency_penalty` and `presence_penalty` (OpenAI): taken off the logits of tokens of the answer, once per
   occurrence, and once.
4. Forbidden tokens become -inf; see `token_masks.py`.

A token that only the device knows, as the step before samples it, counts there.
"""

import math
from collections.abc import Iterable, Sequence

import numpy
import torch
from torch import Tensor

from headway_runtime.batch import Chunk
from headway_runtime.occurrences import OccurrenceCounters
from headway_runtime.request import SamplingParams
from headway_runtime.token_feed import TokenFeed
from headway_runtime.token_masks import TokenMasks, Unsatisfiable, flat_places, forbids_stops, is_masked


def needs_edits(chunk: Chunk) -> bool:
    """Whether the request changes the logits now."""
    sampling = chunk.sampling
    return is_masked(sampling) or bool(sampling.logit_bias) or is_penalized(sampling) or forbids_stops(chunk)


def is_penalized(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class LogitEdits:
    """The edits of some rows, the same in every step until another request joins or leaves them.

    chunks: of all rows of the tensor that is edited, in order.
    """

    def __init__(self, chunks: Sequence[Chunk], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        params = [chunk.sampling for chunk in chunks]
        self._bias = self._plan_bias(params)
        self._penalized = [row for row, one in enumerate(params) if is_penalized(one)]
        self._penalties = numpy.array(
            [
                (params[row].repetition_penalty, params[row].frequency_penalty, params[row].presence_penalty)
                for row in self._penalized
            ],
            dtype=numpy.float32,
        )
        masked = [row for row, one in enumerate(params) if is_masked(one)]
        self._masks = TokenMasks(chunks, masked, vocab_size, device) if masked else None
        stops: list[Iterable[int]] = [
            one.sampling.stop_token_ids if forbids_stops(one) and not is_masked(one.sampling) else ()
            for one in chunks
        ]
        self._stops = flat_places(stops, vocab_size, device)

    def apply(
        self,
        logits: Tensor,
        chunks: Sequence[Chunk],
        counters: OccurrenceCounters,
        feed: TokenFeed | None = None,
    ) -> dict[int, Unsatisfiable]:
        """Change float32 logits [rows, vocab_size] in place; says which rows are left without any token.

        feed: of the tokens that chunks end in and the host has not read; None: there is none.
        """
        flat = logits.view(-1)
        if self._bias is not None:
            flat.index_add_(0, *self._bias)
        if self._penalized:
            self._penalize(flat, [chunks[row] for row in self._penalized], counters, feed)
        if self._stops is not None:
            flat.index_fill_(0, self._stops, -math.inf)
        return self._masks.apply(logits, chunks) if self._masks is not None else {}

    def _penalize(
        self, flat: Tensor, chunks: list[Chunk], counters: OccurrenceCounters, feed: TokenFeed | None
    ) -> None:
        found = [counters.count(chunk) for chunk in chunks]
        lengths = [len(tokens) for tokens, _ in found]
        starts = numpy.array(self._penalized, dtype=numpy.int64) * self._vocab_size
        index = numpy.concatenate([tokens for tokens, _ in found]) + numpy.repeat(starts, lengths)
        places = torch.from_numpy(index).to(self._device)
        counts = torch.from_numpy(numpy.concatenate([counts for _, counts in found])).to(self._device)
        rows = torch.from_numpy(numpy.repeat(numpy.arange(len(chunks)), lengths)).to(self._device)
        penalties = torch.from_numpy(self._penalties).to(self._device)
        unread = None if feed is None else feed.unread(chunks)
        if unread is None:
            _penalize_places(flat, places, counts, penalties[rows])
            return
        own_starts = torch.from_numpy(starts).to(self._device)
        is_unread = places == torch.where(unread < 0, -1, unread + own_starts)[rows]
        _penalize_places(flat, places, counts + is_unread, penalties[rows])
        # It may be none of those that the host knows of; then it occurs once.
        is_listed = torch.zeros(len(chunks), device=self._device).index_add_(0, rows, is_unread.float()) > 0
        own_places = unread.clamp(min=0) + own_starts
        before = flat.index_select(0, own_places)
        _penalize_places(flat, own_places, torch.ones_like(before), penalties)
        after = flat.index_select(0, own_places)
        flat.index_copy_(0, own_places, torch.where(is_listed | (unread < 0), before, after))

    def _plan_bias(self, params: list[SamplingParams]) -> tuple[Tensor, Tensor] | None:
        places = flat_places(
            [[token for token, _ in one.logit_bias] for one in params], self._vocab_size, self._device
        )
        if places is None:
            return None
        values = [bias for one in params for token, bias in one.logit_bias if token < self._vocab_size]
        return places, torch.tensor(values, dtype=torch.float32, device=self._device)


def _penalize_places(flat: Tensor, places: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """counts: how often the token of each place is in the answer. penalties: [places, 3]."""
    repetition, frequency, presence = penalties.unbind(1)
    values = flat.index_select(0, places)
    values = torch.where(values > 0.0, values / repetition, values * repetition)
    values -= counts * frequency
    values -= (counts > 0.0) * presence
    flat.index_copy_(0, places, values)
