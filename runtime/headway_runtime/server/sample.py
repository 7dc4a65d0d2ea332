"""The compact sample that the controller reads: version 1, at most 4096 bytes whatever was counted.

Counts grow for as long as an engine lives, so a sample could outgrow its bound in the end. Then the sample
starts over: it is counted from what the last sample said, under a new `instance`, which to its reader is
what a restarted engine looks like: nothing is lost and nothing is counted twice.
"""

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from headway_runtime.histograms import EDGE_RATIO, FIRST_EDGE_MILLISECONDS, NUM_EDGES, HistogramSnapshot
from headway_runtime.metrics import MetricsSnapshot
from headway_runtime.server.messages import EngineState

SAMPLE_VERSION = 1
MAX_SAMPLE_BYTES = 4096
HISTOGRAMS = ("ttft", "queue", "prefill", "tpot", "step", "e2e")
COUNTERS = (
    *("received", "finished", "aborted", "rejected", "errors"),
    *("ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "e2e_met", "e2e_missed"),
    *("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"),
)
MOMENTS = ("decode_steps", "prompt_steps", "prompts", "answers")
_SLO_COUNTERS = ("ttft_met", "ttft_missed", "tpot_met", "tpot_missed", "e2e_met", "e2e_missed")
_EDGES = {"first_milliseconds": FIRST_EDGE_MILLISECONDS, "ratio": EDGE_RATIO, "count": NUM_EDGES}


@dataclass(frozen=True, slots=True)
class _Base:
    """What a sample is counted from."""

    instance: str
    metrics: MetricsSnapshot | None


class SampleWriter:
    """Writes the samples of one engine, one after the other."""

    def __init__(self) -> None:
        self._base: _Base | None = None
        self._last: MetricsSnapshot | None = None

    def write(self, state: EngineState, *, is_draining: bool) -> bytes:
        """The sample as JSON."""
        if self._base is None:
            self._base = _Base(state.instance, None)
        body = _encode(state, self._base, is_draining=is_draining)
        # From the last sample on; if so much happened since that even this is too long, from now on.
        for metrics in (self._last, state.metrics):
            if len(body) <= MAX_SAMPLE_BYTES:
                break
            self._base = _Base(uuid.uuid4().hex, metrics)
            body = _encode(state, self._base, is_draining=is_draining)
        self._last = state.metrics
        return body


def _encode(state: EngineState, base: _Base, *, is_draining: bool) -> bytes:
    metrics = state.metrics
    return msgspec.json.encode(
        {
            "version": SAMPLE_VERSION,
            "instance": base.instance,
            "uptime_seconds": round(state.uptime_seconds, 3),
            "limits": state.limits,
            "envelope": state.envelope,
            "targets": {
                "ttft_milliseconds": metrics.targets.ttft_milliseconds,
                "tpot_milliseconds": metrics.targets.tpot_milliseconds,
                "e2e_milliseconds": metrics.targets.e2e_milliseconds,
                "epoch": metrics.targets_epoch,
            },
            "draining": is_draining,
            "gauges": {
                "running": state.num_running,
                "waiting": state.num_waiting,
                "oldest_waiting_seconds": round(state.oldest_waiting_seconds, 3),
                "kv_blocks_used": state.kv_blocks_used,
                "kv_blocks_total": state.kv_blocks_total,
            },
            "counters": {name: _counter(name, metrics, base.metrics) for name in COUNTERS},
            "edges": _EDGES,
            "histograms": {
                name: _histogram(
                    metrics.histograms[name], None if base.metrics is None else base.metrics.histograms[name]
                )
                for name in HISTOGRAMS
            },
            "moments": {
                name: _sums(
                    getattr(metrics.moments, name),
                    None if base.metrics is None else getattr(base.metrics.moments, name),
                )
                for name in MOMENTS
            }
            | {"gaps": _sums(_gaps(metrics), None if base.metrics is None else _gaps(base.metrics))},
        }
    )


def _gaps(metrics: MetricsSnapshot) -> tuple[float, ...]:
    """Between two tokens of a request: number and milliseconds. A whole histogram would not fit."""
    histogram = metrics.histograms["inter_token"]
    return sum(histogram.counts), histogram.sum_milliseconds


def _sums(sums: tuple[float, ...], base: tuple[float, ...] | None) -> list[float]:
    since = sums if base is None else [now - before for now, before in zip(sums, base, strict=True)]
    return [one if isinstance(one, int) else round(one, 1) for one in since]


def _counter(name: str, metrics: MetricsSnapshot, base: MetricsSnapshot | None) -> int:
    count = metrics.counters[name]
    if base is None:
        return count
    if name in _SLO_COUNTERS and base.targets_epoch != metrics.targets_epoch:
        return count  # these began again with their targets
    return count - base.counters[name]


def _histogram(histogram: HistogramSnapshot, base: HistogramSnapshot | None) -> dict[str, Any]:
    counts, total = list(histogram.counts), histogram.sum_milliseconds
    if base is not None:
        counts = [count - before for count, before in zip(counts, base.counts, strict=True)]
        total -= base.sum_milliseconds
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return {"first": 0, "counts": [], "sum": 0.0}
    first, last = filled[0], filled[-1]
    return {"first": first, "counts": counts[first : last + 1], "sum": round(max(0.0, total), 3)}
