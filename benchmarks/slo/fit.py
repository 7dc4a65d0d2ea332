"""A step model from what a real engine tells of its steps: least squares over the sums in its samples.

Of each time between two samples there are sums over the steps that only decoded, and over those with prompts:
their number n, prompt tokens P, decoding sequences D, tokens K that these attend to, milliseconds. What
prompt tokens attend to, Q, is told by no step; but the engine counts tokens and squares of the prompts that
it begins, and where all that it has begun is computed, the pairs of those since the last such moment are half
of squares and tokens. So steps with prompts are counted between two such moments.

    milliseconds = n * base + P * prefill_token + Q * prefill_context + D * decode + K * decode_context

A prompt that is computed twice (preemption), not to its end (an abort) or in steps with guesses, which are in
no sums, leaves no such moment behind; so a run begins idle, and a fit that misses more of its steps with
prompts than LEAST_COUNTED leaves is refused.

Each row weighs by one over its time, as if variance grew with time, and both kinds of steps count the same:
else a line through prompts of all lengths would be that of the longest. No coefficient is negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
import numpy.typing

from headway_operator.samples import Moments, ReplicaSample
from headway_operator.slo.step_fit import nonnegative_least_squares
from headway_simulator.step_model import StepModel

# In a step's sums (`Moments`), and in those of prompts.
_COUNT, _PROMPT, _DECODES, _CONTEXT, _TIME = 0, 1, 2, 3, 10
_TOKENS, _SQUARES = 1, 2
LEAST_COUNTED = 0.8
Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """relative_error: root of the mean squared error of a row's time, over that time, weighed by the fit."""

    model: StepModel
    relative_error: float
    num_steps: int


def fit(name: str, runs: Sequence[Sequence[ReplicaSample]], delivery_milliseconds: float) -> Fitted:
    """Of the steps between the samples of one engine, in order, over one or several stretches of time: the
    more often it was sampled, the less do short steps vanish in a sum with long ones. ValueError without
    steps of both kinds, or where too few of those with prompts can be counted."""
    moments = [[one.moments for one in run if one.moments is not None] for run in runs]
    decodes = [row for run in moments for row in _decode_rows(run)]
    prompts = [row for run in moments for row in _prompt_rows(run)]
    if not decodes or not prompts:
        raise ValueError("a fit needs steps with prompts and steps without; send more requests")
    counted = sum(row[_COUNT] for row in prompts)
    taken_all = sum(run[-1].prompt_steps[_COUNT] - run[0].prompt_steps[_COUNT] for run in moments if run)
    if counted < LEAST_COUNTED * taken_all:
        raise ValueError(
            f"of {taken_all:.0f} steps with prompts only {counted:.0f} can be counted, as prompts were "
            "preempted, ended early or guessed with; send fewer at once, without speculation"
        )
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


def _decode_rows(run: Sequence[Moments]) -> list[Row]:
    rows: list[Row] = []
    for before, after in pairwise(run):
        sums = numpy.subtract(after.decode_steps, before.decode_steps)
        if sums[_COUNT] >= 1 and sums[_TIME] > 0:
            rows.append((sums[_COUNT], 0.0, 0.0, sums[_DECODES], sums[_CONTEXT], sums[_TIME]))
    return rows


def _prompt_rows(run: Sequence[Moments]) -> list[Row]:
    """Each from one moment to another at which every prompt that was begun is computed."""
    rows: list[Row] = []
    since = run[0] if run else None
    for now in run[1:]:
        assert since is not None
        sums = numpy.subtract(now.prompt_steps, since.prompt_steps)
        begun = numpy.subtract(now.prompts, since.prompts)
        if sums[_COUNT] < 1 or sums[_TIME] <= 0 or begun[_TOKENS] != sums[_PROMPT]:
            continue
        pairs = (begun[_SQUARES] + begun[_TOKENS]) / 2
        rows.append((sums[_COUNT], sums[_PROMPT], pairs, sums[_DECODES], sums[_CONTEXT], sums[_TIME]))
        since = now
    return rows


def _weighted(
    rows: Sequence[Row],
) -> tuple[numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.float64]]:
    """Of one kind, coefficients and times: each row by the root of its weight, over the time of all."""
    table = numpy.array(rows, dtype=numpy.float64)
    taken = table[:, -1]
    weights = numpy.sqrt(1.0 / taken / taken.sum())
    return table[:, :-1] * weights[:, None], taken * weights
