"""What became of the requests of one run, from what `headway bench --save-requests` wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway_simulator.trace import percentile_of

WINDOW_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all that were due: one that failed, or never ended, has missed.

    joint, ttft, tpot: shares within both targets, within each. worst: the joint share of the worst
    WINDOW_SECONDS. p95_ttft, p95_tpot: milliseconds, of those that have one.
    """

    num_requests: int
    num_failed: int
    joint: float
    ttft: float
    tpot: float
    worst: float
    p95_ttft: float
    p95_tpot: float


def outcome_of(point: Mapping[str, Any], ttft_target: float, tpot_target: float) -> Outcome:
    """point: of a report of `headway bench`. Targets in milliseconds."""
    requests = [one for one in point["requests"] if not one["is_warmup"]]
    if not requests:
        raise SystemExit("the report holds no request; give a longer excerpt")
    ttfts = [_ttft(one) for one in requests]
    tpots = [_tpot(one) for one in requests]
    in_ttft = [value is not None and value <= ttft_target for value in ttfts]
    # An answer of one token has no time between tokens.
    in_tpot = [
        not one["failure"] and (value or 0.0) <= tpot_target
        for one, value in zip(requests, tpots, strict=True)
    ]
    both = [first and later for first, later in zip(in_ttft, in_tpot, strict=True)]
    windows: dict[int, list[bool]] = {}
    for one, kept in zip(requests, both, strict=True):
        windows.setdefault(int(one["due"] / 1000 // WINDOW_SECONDS), []).append(kept)
    return Outcome(
        len(requests),
        sum(bool(one["failure"]) for one in requests),
        _share(both),
        _share(in_ttft),
        _share(in_tpot),
        min(map(_share, windows.values())),
        _p95(ttfts),
        _p95(tpots),
    )


def _ttft(request: Mapping[str, Any]) -> float | None:
    """From when it was due, so that a client that is late does not hide a wait; None without a token."""
    if request["failure"] or not request["event_times"]:
        return None
    return float(request["event_times"][0] - request["due"])


def _tpot(request: Mapping[str, Any]) -> float | None:
    times, counts = request["event_times"], request["event_tokens"]
    if request["failure"] or len(times) < 2:
        return None
    return float((times[-1] - times[0]) / max(1, sum(counts[1:])))


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _p95(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return percentile_of(known, 95) if known else 0.0
