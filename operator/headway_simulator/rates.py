"""Requests out of rates: renewal processes whose rate changes with time, and lengths drawn for them.

A process of rate r(t) is one of rate 1 on a stretched clock: with R(t) the integral of r, the gaps of R are
independent gamma variables of mean 1 (exponential ones make it Poisson), and each R is taken back to its t.
That keeps the burstiness asked for where the rate moves (Gerhardt and Nelson 2009, "Transforming renewal
processes for simulation of nonstationary arrival processes").
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway_simulator.errors import OptionsError
from headway_simulator.trace import Arrival, Trace

# Lengths where no trace lends its own: lognormal, median and sigma of the natural logarithm. They are of the
# size of conversations as Azure's trace of 2023 shows them (mean prompt 1,155 tokens, mean answer 211).
PROMPT_MEDIAN, PROMPT_SIGMA = 850.0, 0.8
OUTPUT_MEDIAN, OUTPUT_SIGMA = 165.0, 0.7
# Beyond these, standard deviations of gaps over their mean are no numbers that gaps can be drawn by.
LEAST_VARIATION, MOST_VARIATION = 0.01, 100.0
MOST_REQUESTS = 10_000_000
# Of rates that would make more than those, so many are taken where nobody says how many: minutes of work.
FEW_REQUESTS = 100_000
LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_OUTPUT_TOKENS = 1, 8192, 2048


@dataclass(frozen=True, slots=True)
class RateWindow:
    """How fast requests come in [start, end); variation: of the gaps (standard deviation over mean)."""

    start_seconds: float
    end_seconds: float
    requests_per_second: float
    variation: float | None = None


class Lengths:
    """Pairs of lengths: drawn, with repetition, from a trace's requests, or lognormal ones without one."""

    def __init__(self, trace: Trace | None) -> None:
        self._recorded = () if trace is None else trace.arrivals

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its answer."""
        if self._recorded:
            one = chance.choice(self._recorded)
            return one.prompt_tokens, one.output_tokens
        prompt = chance.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA)
        output = chance.lognormvariate(math.log(OUTPUT_MEDIAN), OUTPUT_SIGMA)
        return (
            max(LEAST_TOKENS, min(MOST_PROMPT_TOKENS, round(prompt))),
            max(LEAST_TOKENS, min(MOST_OUTPUT_TOKENS, round(output))),
        )


def arrivals_of(
    name: str,
    windows: Sequence[RateWindow],
    lengths: Lengths,
    seed: int,
    *,
    variation: float | None = None,
    step_at_seconds: float | None = None,
) -> Trace:
    """A trace that follows the windows' rates.

    variation: of all gaps, of a process that has gone on for ever; None takes each window's own, and 1,
    Poisson, where it has none, of one that begins as if a request had just come.
    Raises OptionsError where the rates bring no request, or more than MOST_REQUESTS.
    """
    expected = sum(one.requests_per_second * (one.end_seconds - one.start_seconds) for one in windows)
    check_number(name, expected)
    chance = random.Random(f"arrivals {seed}")
    arrivals = tuple(Arrival(at, *lengths.draw(chance)) for at in _times(windows, variation, chance))
    if not arrivals:
        raise OptionsError(f"{name}: these rates bring no request; raise them or the duration")
    return Trace(name, arrivals, windows[-1].end_seconds, step_at_seconds)


def check_number(name: str, num_requests: float) -> None:
    """OptionsError for more requests than can be held."""
    if not num_requests <= MOST_REQUESTS:
        raise OptionsError(
            f"{name}: {num_requests:.3g} requests are more than {MOST_REQUESTS:,}; lower the rate "
            "(--rate, --rate-scale), or make the load shorter (--end-seconds, --duration-seconds)"
        )


def within(windows: Sequence[RateWindow], start: float, end: float) -> tuple[RateWindow, ...]:
    """What of the windows lies in [start, end), at the times that they have."""
    return tuple(
        replace(one, start_seconds=max(one.start_seconds, start), end_seconds=min(one.end_seconds, end))
        for one in windows
        if one.start_seconds < end and one.end_seconds > start
    )


def mean_rate(windows: Sequence[RateWindow], start: float = 0.0, end: float = math.inf) -> float | None:
    """Requests per second over [start, end); None where no window is in it."""
    lengths = [max(0.0, min(one.end_seconds, end) - max(one.start_seconds, start)) for one in windows]
    num_requests = sum(one.requests_per_second * length for one, length in zip(windows, lengths, strict=True))
    return num_requests / sum(lengths) if sum(lengths) else None


def scaled_to_mean(
    windows: Sequence[RateWindow], requests_per_second: float, start: float = 0.0, end: float = math.inf
) -> tuple[RateWindow, ...]:
    """The same course of rates, with another mean over [start, end). OptionsError if all are 0 there.

    A lower rate is a choice of the requests at random, each with probability p. That takes bursts apart: of a
    renewal process whose gaps have the squared variation v, the thinned one's is 1 + p * (v - 1).
    """
    mean = mean_rate(windows, start, end)
    if not mean:
        raise OptionsError(
            f"--rate={requests_per_second:g}: the trace's rates are all 0 in the part that is taken, and "
            "there is nothing to scale; take another part (--start-seconds, --end-seconds, --half)"
        )
    factor = requests_per_second / mean
    return tuple(
        replace(
            one,
            requests_per_second=one.requests_per_second * factor,
            variation=None if one.variation is None else _thinned(one.variation, min(1.0, factor)),
        )
        for one in windows
    )


def _thinned(variation: float, share: float) -> float:
    return math.sqrt(1 + share * (variation**2 - 1))


def _times(windows: Sequence[RateWindow], variation: float | None, chance: random.Random) -> Iterator[float]:
    """When requests come."""
    left = 0.0  # of the gap under way, in units of the stretched clock
    is_first = True
    for window in windows:
        rate = window.requests_per_second
        if rate == 0:
            continue
        bursty = variation or window.variation or 1.0
        at = window.start_seconds
        if is_first:
            left, is_first = _gap(chance, bursty) if variation is None else _first(chance, bursty), False
        while at + left / rate < window.end_seconds:
            at += left / rate
            yield at
            left = _gap(chance, bursty)
        left -= (window.end_seconds - at) * rate


def _first(chance: random.Random, variation: float) -> float:
    """What is left of a gap that began before: a random part of one that is drawn by its length (forward
    recurrence time; Cox 1962, "Renewal Theory"). A process that begins with a request instead has
    (variation**2 - 1) / 2 more of them than its rate says."""
    if variation == 1.0:
        return _gap(chance, variation)
    shape = variation**-2
    return chance.random() * chance.gammavariate(shape + 1, 1 / shape)


def _gap(chance: random.Random, variation: float) -> float:
    """Gamma of mean 1: its shape is 1 over the squared variation."""
    shape = variation**-2
    return chance.gammavariate(shape, 1 / shape)
