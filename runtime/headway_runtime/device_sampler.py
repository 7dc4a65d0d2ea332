"""`sampler.py` for logits on a GPU: the same tokens, by kernels, without a wait until they are read.

    logits -> edits of the rows that ask for any: one launch (`kernels/triton/edit_logits.py`)
           -> a token of each row: two launches for the rows that are not edited, two for the others, whatever
              their parameters are (`kernels/triton/draw.py`)
           -> log-probabilities of the rows that ask for them: two launches (`kernels/triton/top_logprobs.py`)

`launch` puts all that on the device's queue and returns at once: the tokens are a tensor there, which the
next step can be computed from. `read` waits for them. Parameters are looked up on the device, row by row;
they are sent when a request joins or leaves, and in each step only positions, and what edits need.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.batch import Chunk, Sample
from headway_runtime.device_edits import DeviceEdits, uploaded
from headway_runtime.draws import MASK_64, block_size_of, split_mix
from headway_runtime.kernels.triton.draw import DrawParameters, draw
from headway_runtime.kernels.triton.top_logprobs import TopLogprobs, top_logprobs
from headway_runtime.logit_edits import needs_edits
from headway_runtime.occurrences import OccurrenceCounters
from headway_runtime.request import SamplingParams, TokenLogprobs
from headway_runtime.token_feed import TokenFeed
from headway_runtime.token_masks import Unsatisfiable, forbids_stops


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Samples that are being chosen. tokens: int64 [chunks], -1 where there is none; on the device.

    on_host: the same. logprobs: of the rows at these places, on the host. Both are there from `moment` on.
    """

    tokens: Tensor
    on_host: Tensor
    params: Sequence[SamplingParams]
    problems: dict[int, Unsatisfiable]
    places: Sequence[int]
    logprobs: TopLogprobs | None
    moment: transfers.Moment

    def read(self) -> list[Sample]:
        """Waits for the device."""
        self.moment.wait()
        token_ids = self.on_host.tolist()
        found = self._entries()
        samples = []
        for place, token_id in enumerate(token_ids):
            problem = self.problems.get(place)
            if problem is not None:
                samples.append(Sample(None, error=problem.error, error_param=problem.param))
            else:
                samples.append(Sample(token_id, found.get(place)) if token_id >= 0 else Sample(None))
        return samples

    def _entries(self) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        num_top = [self.params[place].num_logprobs or 0 for place in self.places]
        return dict(zip(self.places, listed(self.logprobs, num_top), strict=True))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are chosen from by the same launches. places: in the batch. parameters: but for positions."""

    places: list[int]
    parameters: DrawParameters


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is the same in every step of the same requests; see sampler.py."""

    params: list[SamplingParams]
    min_rows: list[int]
    forbidding: list[int]
    plain: _Rows | None
    edited: _Rows | None
    edits: DeviceEdits | None
    with_logprobs: list[int]
    logprob_rows: Tensor | None


class DeviceSampler:
    """Holds what only depends on the vocabulary, and the plan of the latest batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._block_size = block_size_of(vocab_size)
        self._counters = OccurrenceCounters()
        self._plan: _Plan | None = None

    def __call__(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[Sample]:
        """logits: [chunks, vocab_size] in the model's dtype; not changed."""
        return self.launch(logits, chunks).read()

    def launch(
        self, logits: Tensor, chunks: Sequence[Chunk], feed: TokenFeed | None = None
    ) -> PendingSamples:
        """The same, without waiting for it. feed: of tokens that chunks end in and the host has not read."""
        plan = self._plan_for(chunks)
        positions = self._positions(plan, chunks)
        tokens = torch.empty(len(chunks), dtype=torch.int64, device=self._device)
        problems: dict[int, Unsatisfiable] = {}
        if plan.plain is not None:
            parameters = _at(plan.plain, positions[0])
            draw(logits, parameters, tokens, self._block_size, reads_places=True)
        if plan.edited is not None:
            assert plan.edits is not None
            places = plan.edited.places
            self._counters.next_step()
            own = [chunks[place] for place in places]
            rows, found = plan.edits.apply(logits, own, self._counters, feed)
            problems = {places[row]: problem for row, problem in found.items()}
            parameters = _at(plan.edited, positions[-1])
            draw(rows, parameters, tokens, self._block_size, reads_places=False)
        logprobs = self._logprobs(logits, plan, tokens)
        return PendingSamples(
            tokens,
            transfers.brought(tokens),
            plan.params,
            problems,
            plan.with_logprobs,
            None if logprobs is None else on_host(logprobs),
            transfers.Moment(self._device),
        )

    def _logprobs(self, logits: Tensor, plan: _Plan, tokens: Tensor) -> TopLogprobs | None:
        if not plan.with_logprobs:
            return None
        most = max(plan.params[place].num_logprobs or 0 for place in plan.with_logprobs)
        most = min(most, self._vocab_size)
        return top_logprobs(logits, plan.logprob_rows, tokens, most, self._block_size)

    def _positions(self, plan: _Plan, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Of the tokens to be drawn, int64, of the rows that are not edited and of those that are."""
        parts = [
            numpy.array([chunks[place].num_known for place in rows.places], dtype=numpy.int64)
            for rows in (plan.plain, plan.edited)
            if rows is not None
        ]
        sent = uploaded([part.view(numpy.int32) for part in parts], self._device)
        return [one.view(torch.int64) for one in sent]

    def _plan_for(self, chunks: Sequence[Chunk]) -> _Plan:
        params = [one.sampling for one in chunks]
        plan = self._plan
        # Mostly the very same objects as in the step before, which makes comparing them cheap.
        if plan is not None and plan.params == params:
            if not plan.min_rows:
                return plan
            if plan.forbidding == [row for row in plan.min_rows if forbids_stops(chunks[row])]:
                return plan
        self._plan = plan = self._make_plan(chunks, params)
        return plan

    def _make_plan(self, chunks: Sequence[Chunk], params: list[SamplingParams]) -> _Plan:
        edited = [place for place, one in enumerate(chunks) if needs_edits(one)]
        is_edited = set(edited)
        plain = [place for place in range(len(chunks)) if place not in is_edited]
        min_rows = [row for row, one in enumerate(params) if one.min_tokens > 0]
        with_logprobs = [row for row, one in enumerate(params) if one.num_logprobs is not None]
        logprob_rows = None
        if len(with_logprobs) not in (0, len(chunks)):
            (logprob_rows,) = uploaded([numpy.array(with_logprobs, dtype=numpy.int32)], self._device)
        return _Plan(
            params=params,
            min_rows=min_rows,
            forbidding=[row for row in min_rows if forbids_stops(chunks[row])],
            plain=self._plan_rows(plain, params),
            edited=self._plan_rows(edited, params),
            edits=DeviceEdits([chunks[place] for place in edited], edited, self._vocab_size, self._device)
            if edited
            else None,
            with_logprobs=with_logprobs,
            logprob_rows=logprob_rows,
        )

    def _plan_rows(self, places: list[int], params: list[SamplingParams]) -> _Rows | None:
        if not places:
            return None
        own = [params[place] for place in places]
        seeds = numpy.array([split_mix(one.seed & MASK_64) for one in own], dtype=numpy.uint64)
        numbers = [
            numpy.array([getattr(one, name) for one in own], dtype=numpy.float32).view(numpy.int32)
            for name in ("temperature", "top_p", "min_p")
        ]
        top_k = numpy.array([min(one.top_k, self._vocab_size) for one in own], dtype=numpy.int32)
        parts = [seeds.view(numpy.int32), numpy.array(places, dtype=numpy.int32), top_k, *numbers]
        sent_seeds, sent_places, sent_top_k, *sent = uploaded(parts, self._device)
        temperatures, top_p, min_p = (one.view(torch.float32) for one in sent)
        nowhere = sent_seeds.new_empty(0, dtype=torch.int64)
        return _Rows(
            places,
            DrawParameters(
                sent_places, temperatures, sent_top_k, top_p, min_p, sent_seeds.view(torch.int64), nowhere
            ),
        )


def _at(rows: _Rows, positions: Tensor) -> DrawParameters:
    one = rows.parameters
    return DrawParameters(one.places, one.temperatures, one.top_k, one.top_p, one.min_p, one.seeds, positions)


def on_host(found: TopLogprobs) -> TopLogprobs:
    """The same, to be read once a moment from now on has passed."""
    ranks = None if found.ranks is None else transfers.brought(found.ranks)
    parts = (found.logprobs, found.tokens)
    return TopLogprobs(transfers.brought(found.chosen), ranks, *map(transfers.brought, parts))


def listed(found: TopLogprobs, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """As the values of a request. num_top: how many likeliest tokens each row asked for."""
    ranks = [None] * len(num_top) if found.ranks is None else found.ranks.tolist()
    rows = zip(
        found.chosen.tolist(), num_top, found.logprobs.tolist(), found.tokens.tolist(), ranks, strict=True
    )
    return [
        TokenLogprobs(
            chosen,
            tuple(pair for pair in zip(tokens[:count], logprobs[:count], strict=True) if pair[0] >= 0),
            rank,
        )
        for chosen, count, logprobs, tokens, rank in rows
    ]
