"""The next token of each sequence, chosen from its logits.

    logits -> log-probabilities, of the model's own distribution, if asked for
           -> edits: bias, penalties, forbidden tokens (`logit_edits.py`, `token_masks.py`)
           -> temperature 0: the likeliest token
              else: temperature, then min-p, top-k, top-p, then a draw that hangs on the seed (`draws.py`)

That is the order of operations of vLLM, and all values are defined as there. Rows that are edited are copied
to float32 first; all others are read where they are, so that a request pays for what it asks for and for
nothing else. What can be prepared for a set of requests is prepared once and used until another one joins or
leaves.

A row whose logits are not finite gives no token, nor does one to which its request leaves none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from headway_runtime import transfers
from headway_runtime.batch import Chunk, Sample
from headway_runtime.draws import LOWEST_TEMPERATURE, Drawer, DrawRows, Integers
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.logit_edits import LogitEdits, needs_edits
from headway_runtime.logprobs import token_logprobs
from headway_runtime.occurrences import OccurrenceCounters
from headway_runtime.request import SamplingParams, TokenLogprobs
from headway_runtime.token_feed import TokenFeed
from headway_runtime.token_masks import Unsatisfiable, forbids_stops

if TYPE_CHECKING:
    from headway_runtime.device_sampler import DeviceSampler

# A row's maximum is found faster in two steps, by blocks of about this size, if there is enough to look
# through.
MAXIMUM_BLOCK = 2048
LEAST_IN_BLOCKS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Choices:
    """How tokens are chosen from some rows of logits.

    greedy: rows that take the likeliest token; None if there is none. greedy_places: where these belong in
        the batch. draws: the other rows.
    """

    greedy: slice | Tensor | None
    greedy_places: list[int]
    draws: list[DrawRows]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is the same in every step of the same requests.

    forbidding: rows whose stop tokens are forbidden, for as long as the plan holds.
    min_rows: rows that may stop being so. plain: rows that are not edited. edited: the other ones, by
        `places`.
    """

    params: list[SamplingParams]
    min_rows: list[int]
    forbidding: list[int]
    plain: _Choices
    places: list[int]
    edits: LogitEdits | None
    edited: _Choices
    with_logprobs: list[int]


class Sampler:
    """Holds what only depends on the vocabulary, and the plan of the latest batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._drawer = Drawer(vocab_size, device)
        self._counters = OccurrenceCounters()
        self._plan: _Plan | None = None
        self._maximum_block = max(
            size for size in range(1, min(MAXIMUM_BLOCK, vocab_size) + 1) if vocab_size % size == 0
        )

    def __call__(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[Sample]:
        """logits: [chunks, vocab_size] in the model's dtype; not changed."""
        return self.launch(logits, chunks).read()

    def launch(
        self, logits: Tensor, chunks: Sequence[Chunk], feed: TokenFeed | None = None
    ) -> "ChosenSamples":
        """The same in two parts, the first of which chooses the tokens.

        feed: of tokens that chunks end in and the host has not read; None: there is none.
        """
        plan = self._plan_for(chunks)
        problems: dict[int, Unsatisfiable] = {}
        if plan.edits is None and len(plan.plain.greedy_places) == len(chunks):
            times, tokens = self._likeliest(logits)
        else:
            tokens = torch.empty(len(chunks), dtype=torch.int64, device=self._device)
            times = torch.empty(len(chunks), dtype=torch.float32, device=self._device)
            positions = numpy.array([one.num_known for one in chunks], dtype=numpy.int64)
            self._choose(logits, plan.plain, positions, tokens, times)
            if plan.edits is not None:
                edited = logits[plan.places].float()
                rows = [chunks[place] for place in plan.places]
                self._counters.next_step()
                found = plan.edits.apply(edited, rows, self._counters, feed)
                problems = {plan.places[row]: problem for row, problem in found.items()}
                self._choose(edited, plan.edited, positions, tokens, times)
        tokens = torch.where(times.isfinite(), tokens, -1)
        return ChosenSamples(
            self, logits, plan, tokens, transfers.brought(tokens), problems, transfers.Moment(self._device)
        )

    def samples(
        self, logits: Tensor, plan: _Plan, token_ids: list[int], problems: dict[int, Unsatisfiable]
    ) -> list[Sample]:
        """What was chosen, with the log-probabilities that were asked for."""
        if not plan.with_logprobs and not problems and min(token_ids) >= 0:
            return [Sample(token_id) for token_id in token_ids]
        logprobs = self._logprobs(logits, plan, token_ids)
        samples = []
        for place, token_id in enumerate(token_ids):
            problem = problems.get(place)
            if problem is not None:
                samples.append(Sample(None, error=problem.error, error_param=problem.param))
            else:
                samples.append(Sample(token_id, logprobs.get(place)) if token_id >= 0 else Sample(None))
        return samples

    def _logprobs(self, logits: Tensor, plan: _Plan, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        if not plan.with_logprobs:
            return {}
        places = plan.with_logprobs
        entries = token_logprobs(
            logits if len(places) == len(logits) else logits[places],
            [max(0, token_ids[place]) for place in places],
            [plan.params[place].num_logprobs or 0 for place in places],
        )
        return dict(zip(places, entries, strict=True))

    def _choose(
        self, logits: Tensor, choices: _Choices, positions: Integers, tokens: Tensor, times: Tensor
    ) -> None:
        """Write a token, and a number that is finite if there is one, to the places of all these rows."""
        if choices.greedy is not None:
            best, likeliest = self._likeliest(logits[choices.greedy])
            tokens[choices.greedy_places] = likeliest
            times[choices.greedy_places] = best.float()
        for part in choices.draws:
            tokens[part.places], times[part.places] = self._drawer.draw(logits, part, positions)

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's maximum and its token, the first of equals."""
        rows = len(logits)
        if logits.numel() < LEAST_IN_BLOCKS or self._device.type != "cpu":
            best, tokens = logits.max(dim=-1)
            return best, tokens
        blocks = logits.view(rows, -1, self._maximum_block)
        block = blocks.amax(dim=-1).max(dim=-1).indices
        best, within = blocks[torch.arange(rows), block].max(dim=-1)
        return best, block * self._maximum_block + within

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
        places = [place for place, one in enumerate(chunks) if needs_edits(one)]
        is_edited = set(places)
        plain = [place for place in range(len(chunks)) if place not in is_edited]
        min_rows = [row for row, one in enumerate(params) if one.min_tokens > 0]
        return _Plan(
            params=params,
            min_rows=min_rows,
            forbidding=[row for row in min_rows if forbids_stops(chunks[row])],
            plain=self._plan_choices(plain, plain, params),
            places=places,
            edits=LogitEdits([chunks[place] for place in places], self._vocab_size, self._device)
            if places
            else None,
            edited=self._plan_choices(list(range(len(places))), places, params),
            with_logprobs=[row for row, one in enumerate(params) if one.num_logprobs is not None],
        )

    def _plan_choices(self, rows: list[int], places: list[int], params: list[SamplingParams]) -> _Choices:
        """rows: indices into the logits that are chosen from; places: of the same ones in the batch."""
        greedy: list[tuple[int, int]] = []
        drawn: list[tuple[int, int]] = []
        for row, place in zip(rows, places, strict=True):
            (greedy if params[place].temperature < LOWEST_TEMPERATURE else drawn).append((row, place))
        draws = self._drawer.plan(
            [row for row, _ in drawn],
            [place for _, place in drawn],
            [params[place] for _, place in drawn],
        )
        greedy_rows = [row for row, _ in greedy]
        index: slice | Tensor | None = None
        if greedy_rows:
            is_range = greedy_rows == list(range(greedy_rows[0], greedy_rows[-1] + 1))
            first, last = greedy_rows[0], greedy_rows[-1]
            index = slice(first, last + 1) if is_range else torch.tensor(greedy_rows, device=self._device)
        return _Choices(index, [place for _, place in greedy], draws)


@dataclass(frozen=True, slots=True)
class ChosenSamples:
    """Tokens that were chosen, and what else is asked of their logits. tokens: -1 where there is none.

    on_host: the same tokens, there from `moment` on.
    """

    sampler: Sampler
    logits: Tensor
    plan: _Plan
    tokens: Tensor
    on_host: Tensor
    problems: dict[int, Unsatisfiable]
    moment: transfers.Moment

    def read(self) -> list[Sample]:
        """Waits for the device."""
        self.moment.wait()
        return self.sampler.samples(self.logits, self.plan, self.on_host.tolist(), self.problems)


def make_sampler(vocab_size: int, device: torch.device) -> "Sampler | DeviceSampler":
    """The one for this device."""
    if not uses_triton(device):
        return Sampler(vocab_size, device)
    from headway_runtime.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)
