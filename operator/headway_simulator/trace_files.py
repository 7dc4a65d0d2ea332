"""Trace files as the simulator's loads: requests by time, or rates; the formats are `headway_traces`'."""

import math
from pathlib import Path

from headway_simulator.errors import TraceError
from headway_simulator.rates import LEAST_VARIATION, MOST_REQUESTS, MOST_VARIATION, RateWindow
from headway_simulator.trace import Arrival, Trace
from headway_traces import TraceFile, TraceFileError, read_trace_file


def read_trace(path: Path) -> Trace | tuple[RateWindow, ...]:
    """The requests in `path`, or its rates where it holds rates.

    Raises TraceError, also where there are more requests than a load may have.
    """
    try:
        found = read_trace_file(path, str(path), MOST_REQUESTS)
    except TraceFileError as error:
        raise TraceError(str(error)) from error
    return _trace(path.name, found) if found.requests else _windows(path, found)


def _trace(name: str, found: TraceFile) -> Trace:
    arrivals = tuple(
        Arrival(one.at_seconds, one.input_tokens, one.output_tokens, one.hash_ids, one.block_tokens)
        for one in found.requests
    )
    last = arrivals[-1].at_seconds
    # The mean gap follows the last request, too.
    return Trace(name, arrivals, last + (last / (len(arrivals) - 1) if len(arrivals) > 1 and last else 1.0))


def _windows(path: Path, found: TraceFile) -> tuple[RateWindow, ...]:
    if math.isinf(found.windows[-1].end_seconds):
        raise TraceError(f"{path} holds one window; two at least say how long each lasts")
    for one in found.windows:
        variation = one.coefficient_of_variation
        if variation is not None and not LEAST_VARIATION <= variation <= MOST_VARIATION:
            raise TraceError(
                f"{path}, window {one.start_seconds:g} s after the first: rate_weighted_cv={variation!r} is "
                f"not from {LEAST_VARIATION:g} to {MOST_VARIATION:g}; correct it, or leave it empty"
            )
    return tuple(
        RateWindow(one.start_seconds, one.end_seconds, one.requests_per_second, one.coefficient_of_variation)
        for one in found.windows
    )
