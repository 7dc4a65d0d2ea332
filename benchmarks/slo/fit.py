"""A step model from what a real engine tells of its steps: least squares over the sums in its samples.

With x = (1, prompt tokens, decoding sequences, tokens that these attend to), an engine sums the products of
x with x and with the time, over steps that only decoded and over those with prompts. What was added between
two samples weighs by one over its steps' mean time, as if variance grew with time, and both kinds of steps
count the same: else a line through prompts of all lengths, of which long ones take longer for a token, is
that of the longest. No coefficient is negative: of all subsets of the four, the solution of least error
among those without a negative one is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy
import numpy.typing

from headway_operator.samples import Moments, ReplicaSample
from headway_simulator.step_model import StepModel

# In a row of sums: of products with each other, and with the time.
_GRAM = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))
_CROSS = (10, 11, 12, 13)
_COUNT, _TIME, _TIME_SQUARED = 0, 10, 14
Sums = numpy.typing.NDArray[numpy.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    """relative_error: root of the mean squared error of a step's time, over its mean, weighed by the fit."""

    model: StepModel
    relative_error: float
    num_steps: int


def fit(name: str, samples: Sequence[ReplicaSample], delivery_milliseconds: float) -> Fitted:
    """Of the steps between the samples of one engine, in order: the more often it was sampled, the less do
    short steps vanish in a sum with long ones. ValueError without steps of both kinds."""
    rows: tuple[list[Sums], list[Sums]] = ([], [])
    for before, after in pairwise(samples):
        assert before.moments is not None
        assert after.moments is not None
        for kind, new, old in zip(rows, _steps(after.moments), _steps(before.moments), strict=True):
            sums = numpy.subtract(new, old)
            if sums[_COUNT] >= 1 and sums[_TIME] > 0:
                kind.append(sums)
    if not all(rows):
        raise ValueError("a fit needs steps with prompts and steps without; send more requests")
    total = _weighted(rows[0]) + _weighted(rows[1])
    base, prefill, decode, context = least_squares(total)
    error = _error(total, (base, prefill, decode, context))
    model = StepModel(
        name=name,
        base_milliseconds=base,
        prefill_token_milliseconds=prefill,
        decode_milliseconds=decode,
        decode_context_milliseconds=context,
        delivery_milliseconds=delivery_milliseconds,
        kv_cache_tokens=16 * samples[-1].kv_blocks_total,
    )
    num_steps = int(sum(sums[_COUNT] for kind in rows for sums in kind))
    return Fitted(model, float(numpy.sqrt(max(0.0, error) / 2)), num_steps)


def _weighted(kind: Sequence[Sums]) -> Sums:
    """The sum of one kind's rows, each weighed by one over its mean time, over the time of all: the kinds
    count the same."""
    whole = sum(sums[_TIME] for sums in kind)
    weighted = [sums * (sums[_COUNT] / sums[_TIME]) for sums in kind]
    return numpy.asarray(numpy.sum(weighted, axis=0) / whole)


def least_squares(sums: Sequence[float] | Sums) -> tuple[float, float, float, float]:
    """The coefficients, none of them negative."""
    gram = numpy.array([[sums[place] for place in row] for row in _GRAM])
    cross = numpy.array([sums[place] for place in _CROSS])
    best: tuple[float, tuple[float, ...]] = (float("inf"), (0.0,) * 4)
    for size in range(1, 5):
        for chosen in map(list, combinations(range(4), size)):
            solved, *_ = numpy.linalg.lstsq(gram[numpy.ix_(chosen, chosen)], cross[chosen], rcond=None)
            if (solved < 0).any():
                continue
            found = numpy.zeros(4)
            found[chosen] = solved
            coefficients = tuple(float(one) for one in found)
            error = _error(sums, coefficients)
            if error < best[0]:
                best = (error, coefficients)
    base, prefill, decode, context = best[1]
    return base, prefill, decode, context


def _error(sums: Sequence[float] | Sums, coefficients: Sequence[float]) -> float:
    gram = numpy.array([[sums[place] for place in row] for row in _GRAM])
    cross = numpy.array([sums[place] for place in _CROSS])
    found = numpy.array(coefficients)
    return float(sums[_TIME_SQUARED] - 2 * found @ cross + found @ gram @ found)


def _steps(moments: Moments) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return moments.decode_steps, moments.prompt_steps
