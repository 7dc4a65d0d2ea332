"""What arrives: requests by time, and what may be done to all of them (cut, halve, scale). Reads no file.

Times are seconds from the trace's start. A trace covers [0, duration_seconds), whether or not anything
arrives at its ends.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Half = Literal["all", "tuning", "verdict"]
# The copies that scale a rate up come this much earlier or later than the original, at most: the rate keeps
# its course from minute to minute, and no two requests become one burst that nobody recorded.
MOST_SHIFT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    prompt_tokens, output_tokens: at least 1. hash_ids: of the prompt's blocks of `hash_block_tokens`, the
    last one perhaps cut off; equal ids at the front of two prompts mean equal tokens there. Empty: shared
    with nobody. user_space: ids of different spaces are different.
    """

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512
    user_space: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time. step_at_seconds: when the load is known to jump, None where nobody knows of one."""

    name: str
    arrivals: tuple[Arrival, ...]
    duration_seconds: float
    step_at_seconds: float | None = None

    @property
    def requests_per_second(self) -> float:
        return len(self.arrivals) / self.duration_seconds


def half_of(trace: Trace, half: Half) -> Trace:
    """The first half of the time is for tuning, the second for the verdict; either begins at 0."""
    if half == "all":
        return trace
    middle = trace.duration_seconds / 2
    bounds = (0.0, middle) if half == "tuning" else (middle, trace.duration_seconds)
    return replace(part_of(trace, *bounds), name=f"{trace.name}, {half} half")


def part_of(trace: Trace, start: float, end: float) -> Trace:
    """What arrives in [start, end), times counted from `start`."""
    end = min(end, trace.duration_seconds)
    arrivals = tuple(
        replace(one, at_seconds=one.at_seconds - start)
        for one in trace.arrivals
        if start <= one.at_seconds < end
    )
    step = trace.step_at_seconds
    return Trace(
        trace.name,
        arrivals,
        end - start,
        step - start if step is not None and start <= step < end else None,
    )


def joined(first: Trace, then: Trace) -> Trace:
    """One after the other; the jump is that of the second one."""
    begin, step = first.duration_seconds, then.step_at_seconds
    later = tuple(replace(one, at_seconds=begin + one.at_seconds) for one in then.arrivals)
    return Trace(
        then.name,
        (*first.arrivals, *later),
        begin + then.duration_seconds,
        None if step is None else begin + step,
    )


def scaled_rate(trace: Trace, factor: float, seed: int) -> Trace:
    """`factor` times as many requests over the same time.

    Below 1 each request is kept with that probability. Above, each comes several times: itself, and copies
    moved by up to MOST_SHIFT_SECONDS, which share prefixes with other copies of their number only, as other
    users would.
    """
    chance = random.Random(f"rate {seed}")
    arrivals: list[Arrival] = []
    for one in trace.arrivals:
        count = math.floor(factor) + (chance.random() < factor % 1)
        for copy in range(count):
            shift = chance.uniform(-MOST_SHIFT_SECONDS, MOST_SHIFT_SECONDS) if copy else 0.0
            arrivals.append(
                replace(
                    one,
                    # Over an end of the trace it comes in at the other one: none is lost.
                    at_seconds=(one.at_seconds + shift) % trace.duration_seconds if copy else one.at_seconds,
                    user_space=copy,
                )
            )
    return replace(trace, arrivals=by_time(arrivals))


def by_time(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """In order of arrival; of equal times in the order given."""
    return tuple(sorted(arrivals, key=lambda one: one.at_seconds))


def percentile_of(values: Iterable[float], percent: float) -> float:
    """The least value that at least `percent` of all do not exceed. ValueError without any."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
