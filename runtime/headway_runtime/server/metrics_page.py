"""The `/metrics` page for Prometheus, made of one snapshot of the engine's counters.

The engine process owns the counters; this only gives them names, units and labels. Times are seconds here,
as Prometheus wants them, in the same buckets as everywhere else.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from headway_runtime.histograms import EDGES_MILLISECONDS, HistogramSnapshot
from headway_runtime.server.messages import EngineState

_EDGE_LABELS = (*(format(edge / 1000.0, ".9g") for edge in EDGES_MILLISECONDS), "+Inf")
_HISTOGRAMS = {
    "ttft": ("headway_time_to_first_token_seconds", "From request received to first byte written."),
    "queue": ("headway_queue_time_seconds", "From request received to first scheduled."),
    "prefill": ("headway_prefill_time_seconds", "From first scheduled to first token."),
    "tpot": ("headway_time_per_output_token_seconds", "Mean time per token after the first, per request."),
    "inter_token": ("headway_inter_token_latency_seconds", "Between two consecutive tokens of a request."),
    "e2e": ("headway_end_to_end_seconds", "From request received to its last token."),
    "step": ("headway_step_time_seconds", "One step of the engine."),
}


def render_metrics(
    state: EngineState, info: dict[str, str], *, is_draining: bool, accept: str
) -> tuple[bytes, str]:
    """The page and its content type, in the format that the Accept header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(state, info, is_draining=is_draining))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Page(Collector):
    def __init__(self, state: EngineState, info: dict[str, str], *, is_draining: bool) -> None:
        self._state = state
        self._info = info
        self._is_draining = is_draining

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("headway_runtime", "What is served, and by what.", self._info)
        yield from self._gauges()
        yield from self._counters()
        for name, (metric, text) in _HISTOGRAMS.items():
            yield _histogram(metric, text, self._state.metrics.histograms[name])

    def _gauges(self) -> Iterator[Metric]:
        state, targets = self._state, self._state.metrics.targets
        plain = (
            ("headway_requests_running", "Requests that hold KV blocks.", state.num_running),
            ("headway_requests_waiting", "Requests that wait to be scheduled.", state.num_waiting),
            ("headway_oldest_waiting_seconds", "Age of the oldest of them.", state.oldest_waiting_seconds),
            ("headway_kv_blocks_used", "KV blocks in use.", state.kv_blocks_used),
            ("headway_kv_blocks_total", "KV blocks there are.", state.kv_blocks_total),
            ("headway_uptime_seconds", "Since the engine started.", state.uptime_seconds),
            ("headway_draining", "1 while the server ends its work.", int(self._is_draining)),
        )
        for name, text, value in plain:
            yield GaugeMetricFamily(name, text, value)
        limits = GaugeMetricFamily("headway_limit", "Batch limits in force.", labels=["limit"])
        envelope = GaugeMetricFamily("headway_limit_max", "Upper ends of the limits.", labels=["limit"])
        for limit in ("max_num_seqs", "max_num_batched_tokens"):
            limits.add_metric([limit], getattr(state.limits, limit))
            envelope.add_metric([limit], getattr(state.envelope, limit))
        yield limits
        yield envelope
        target = GaugeMetricFamily("headway_target_seconds", "SLO targets in force.", labels=["target"])
        for name, milliseconds in (("ttft", targets.ttft_milliseconds), ("tpot", targets.tpot_milliseconds)):
            if milliseconds is not None:
                target.add_metric([name], milliseconds / 1000.0)
        yield target

    def _counters(self) -> Iterator[Metric]:
        metrics = self._state.metrics
        counters = metrics.counters
        yield CounterMetricFamily("headway_requests_received", "Requests received.", counters["received"])
        yield _labelled(
            "headway_requests_finished",
            "Accepted requests by how they ended.",
            ("outcome",),
            (((outcome,), count) for outcome, count in metrics.finished.items()),
        )
        yield _labelled(
            "headway_requests_rejected",
            "Requests not accepted.",
            ("reason",),
            (((reason,), count) for reason, count in metrics.rejected.items()),
        )
        yield _labelled(
            "headway_target",
            "Requests within and outside the targets in force; starts again when a target changes.",
            ("target", "result"),
            (
                ((target, result), counters[f"{target}_{result}"])
                for target in ("ttft", "tpot")
                for result in ("met", "missed")
            ),
        )
        yield _labelled(
            "headway_tokens",
            "Tokens by kind: prompt tokens computed, prompt tokens found in the cache, tokens generated.",
            ("kind",),
            (
                (("prompt",), counters["prompt_tokens"]),
                (("cached",), counters["cached_tokens"]),
                (("generated",), counters["generated_tokens"]),
            ),
        )
        yield CounterMetricFamily(
            "headway_preemptions", "Sequences that lost their blocks.", counters["preemptions"]
        )
        yield _labelled(
            "headway_step_tokens",
            "What steps computed: tokens of prompts, and decoding sequences.",
            ("kind",),
            (
                (("prefill",), counters["prefill_step_tokens"]),
                (("decode",), counters["decode_step_sequences"]),
            ),
        )


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _histogram(name: str, text: str, histogram: HistogramSnapshot) -> HistogramMetricFamily:
    cumulative = accumulate(histogram.counts)
    return HistogramMetricFamily(
        name,
        text,
        buckets=list(zip(_EDGE_LABELS, cumulative, strict=True)),
        sum_value=histogram.sum_milliseconds / 1000.0,
    )
