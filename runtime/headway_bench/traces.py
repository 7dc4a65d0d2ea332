"""Traces as a load: a slice is cut out of one, sped up and thinned. Knows neither clocks nor prompts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from headway_bench.arrivals import RateSegment
from headway_bench.errors import InputFileError, OptionsError
from headway_traces import TraceFile, TraceFileError, TraceRequest, read_trace_file


@dataclass(frozen=True, slots=True)
class Replay:
    """What part of a trace is replayed, and how.

    `speed` 2 replays in half the time; `rate_scale` keeps that share of the requests, chosen at random (of
    rates and their bursts, what such a choice would leave of them), or multiplies rates; `length_scale`
    multiplies lengths. The slice is in the trace's own seconds.
    """

    start_seconds: float = 0.0
    duration_seconds: float = math.inf
    speed: float = 1.0
    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_input_tokens: int | None = None


def read_trace(path: Path) -> TraceFile:
    """The trace in `path`. Raises InputFileError naming the line."""
    try:
        return read_trace_file(path, f"--trace {str(path)!r}")
    except TraceFileError as error:
        raise InputFileError(str(error)) from error


def block_tokens(requests: Iterable[TraceRequest]) -> int:
    """Of a hash id of these. Raises InputFileError where they differ, which only rows of our own can."""
    sizes = sorted({one.block_tokens for one in requests if one.hash_ids})
    if len(sizes) > 1:
        raise InputFileError(
            f"--trace has rows with hash_block_tokens={sizes[0]} and ={sizes[1]}; write one size in all rows"
        )
    return sizes[0] if sizes else 1


def replay_requests(
    trace: TraceFile, replay: Replay, random: numpy.random.Generator
) -> tuple[TraceRequest, ...]:
    """The slice's requests, times counted from the slice's start in seconds of the replay."""
    if replay.rate_scale > 1:
        raise OptionsError(
            f"--trace-rate-scale={replay.rate_scale:g} asks for more requests than the trace has; "
            "use --trace-speed to send them faster"
        )
    end = replay.start_seconds + replay.duration_seconds
    inside = [r for r in trace.requests if replay.start_seconds <= r.at_seconds < end]
    if replay.rate_scale < 1:
        kept = random.random(len(inside)) < replay.rate_scale
        inside = [request for request, keep in zip(inside, kept, strict=True) if keep]
    scaled = [_scaled(request, replay) for request in inside]
    if replay.max_input_tokens is not None:
        scaled = [request for request in scaled if request.input_tokens <= replay.max_input_tokens]
    if not scaled:
        raise OptionsError("the slice of the trace holds no request; widen it or raise --max-input-length")
    return tuple(scaled)


def replay_rates(trace: TraceFile, replay: Replay, burstiness: float | None) -> tuple[RateSegment, ...]:
    """The slice's windows as rates of arrival; `burstiness` overrides what was recorded."""
    end = replay.start_seconds + replay.duration_seconds
    segments = []
    for window in trace.windows:
        start, stop = max(window.start_seconds, replay.start_seconds), min(window.end_seconds, end)
        if start >= stop:
            continue
        rate = window.requests_per_second * replay.rate_scale * replay.speed
        recorded = _thinned(window.coefficient_of_variation, min(1.0, replay.rate_scale))
        shape = burstiness if burstiness is not None or not recorded else recorded**-2
        segments.append(
            RateSegment(
                (start - replay.start_seconds) / replay.speed,
                (stop - replay.start_seconds) / replay.speed,
                rate,
                rate,
                shape,
            )
        )
    if not any(segment.rate_at_start > 0 for segment in segments):
        raise OptionsError("the slice of the trace holds no window with requests; widen it")
    return tuple(segments)


def _thinned(variation: float | None, share: float) -> float | None:
    """The gaps' variation where that share of the requests is kept: bursts are taken apart.

    Of a renewal process whose gaps have the squared variation v, the thinned one's is 1 + share * (v - 1).
    """
    return None if not variation else math.sqrt(1 + share * (variation**2 - 1))


def _scaled(request: TraceRequest, replay: Replay) -> TraceRequest:
    return replace(
        request,
        at_seconds=(request.at_seconds - replay.start_seconds) / replay.speed,
        input_tokens=max(1, round(request.input_tokens * replay.length_scale)),
        output_tokens=max(1, round(request.output_tokens * replay.length_scale)),
    )
