"""A step model from what a real engine tells of its steps: least squares over the sums in its samples.

Of each time between two samples there are sums over the steps that only decoded, and over those with prompts:
their number n, what their prompt tokens cost, decoding sequences D, tokens K that these attend to,
milliseconds. Prompt tokens P themselves are counted apart; and what they cost beyond one each is what they
attend to, Q, over the engine's doubling context (`headway_runtime.prompt_cost`).

    milliseconds = n * base + P * prefill_token + Q * prefill_context + D * decode + K * decode_context

Tokens that are computed twice (preemption) or never told (abort) are counted once or not at all, and steps
with guesses are in no sums: a run with any of these is refused.

Each row weighs by one over its time, as if variance grew with time, and both kinds of steps count the same:
else a line through prompts of all lengths would be that of the longest. No coefficient is negative.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
import numpy.typing

from headway_operator.samples import Moments, ReplicaSample
from headway_operator.slo.step_fit import nonnegative_least_squares
from headway_simulator.step_model import StepModel

# In a step's sums (`Moments`).
_COUNT, _COST, _DECODES, _CONTEXT, _TIME = 0, 1, 2, 3, 10
Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """relative_error: root of the mean squared error of a row's time, over that time, weighed by the fit."""

    model: StepModel
    relative_error: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class _Told:
    """Of one sample."""

    moments: Moments
    counters: Mapping[str, int]


def fit(
    name: str,
    runs: Sequence[Sequence[ReplicaSample]],
    delivery_milliseconds: float,
    doubling_context: int,
) -> Fitted:
    """Of the steps between the samples of one engine, in order, over one or several stretches of time: the
    more often it was sampled, the less do short steps vanish in a sum with long ones.

    doubling_context: the engine's; with 0 it counts no pairs, and none are fitted. ValueError without steps
    of both kinds, or where something was preempted, aborted or guessed.
    """
    told = [[_Told(one.moments, one.counters) for one in run if one.moments is not None] for run in runs]
    for run in told:
        if run:
            _check(run[0], run[-1])
    between = [pair for run in told for pair in pairwise(run)]
    decodes = [row for pair in between for row in _decode_rows(*pair)]
    prompts = [row for pair in between for row in _prompt_rows(*pair, doubling_context)]
    if not decodes or not prompts:
        raise ValueError("a fit needs steps with prompts and steps without; send more requests")
    parts, times = zip(*(_weighted(rows) for rows in (decodes, prompts)), strict=True)
    rows, taken = numpy.concatenate(parts), numpy.concatenate(times)
    # Tokens are many and their pairs many more: each column is measured by its own length.
    lengths = numpy.linalg.norm(rows, axis=0)
    scaled = rows / numpy.where(lengths > 0.0, lengths, 1.0)
    gram, cross = scaled.T @ scaled, scaled.T @ taken
    solved = numpy.array(nonnegative_least_squares(gram.tolist(), cross.tolist()))
    base, prefill, pairs, decode, context = (float(one) for one in solved / numpy.maximum(lengths, 1e-300))
    model = StepModel(
        name=name,
        base_milliseconds=base,
        prefill_token_milliseconds=prefill,
        prefill_context_milliseconds=pairs,
        decode_milliseconds=decode,
        decode_context_milliseconds=context,
        delivery_milliseconds=delivery_milliseconds,
        kv_cache_tokens=16 * runs[-1][-1].kv_blocks_total,
    )
    missed = taken - scaled @ solved
    num_steps = int(sum(row[0] for row in (*decodes, *prompts)))
    return Fitted(model, float(numpy.sqrt(missed @ missed / 2)), num_steps)


def _decode_rows(before: _Told, after: _Told) -> Iterator[Row]:
    sums = numpy.subtract(after.moments.decode_steps, before.moments.decode_steps)
    if sums[_COUNT] >= 1 and sums[_TIME] > 0:
        yield (sums[_COUNT], 0.0, 0.0, sums[_DECODES], sums[_CONTEXT], sums[_TIME])


def _prompt_rows(before: _Told, after: _Told, doubling_context: int) -> Iterator[Row]:
    sums = numpy.subtract(after.moments.prompt_steps, before.moments.prompt_steps)
    if sums[_COUNT] >= 1 and sums[_TIME] > 0:
        tokens = after.counters["prompt_tokens"] - before.counters["prompt_tokens"]
        pairs = max(0.0, sums[_COST] - tokens) * doubling_context
        yield (sums[_COUNT], float(tokens), pairs, sums[_DECODES], sums[_CONTEXT], sums[_TIME])


def _check(first: _Told, last: _Told) -> None:
    """ValueError where sums and counters of a run are not of the same tokens."""
    for name, remedy in (("preemptions", "send fewer at once"), ("aborted", "let all requests end")):
        if count := last.counters[name] - first.counters[name]:
            raise ValueError(f"{name}: {count}, of which tokens are in one sum alone; {remedy}")
    num_steps = last.counters["steps"] - first.counters["steps"]
    decodes, prompts = (
        last_sums[_COUNT] - first_sums[_COUNT]
        for first_sums, last_sums in (
            (first.moments.decode_steps, last.moments.decode_steps),
            (first.moments.prompt_steps, last.moments.prompt_steps),
        )
    )
    if num_steps != decodes + prompts:
        raise ValueError(f"{num_steps - decodes - prompts:.0f} steps had guesses; turn speculation off")


def _weighted(
    rows: Sequence[Row],
) -> tuple[numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.float64]]:
    """Of one kind, coefficients and times: each row by the root of its weight, over the time of all."""
    table = numpy.array(rows, dtype=numpy.float64)
    taken = table[:, -1]
    weights = numpy.sqrt(1.0 / taken / taken.sum())
    return table[:, :-1] * weights[:, None], taken * weights
