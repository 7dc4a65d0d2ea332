"""The `/metrics` page for Prometheus, made of one snapshot of the engine's counters.

The engine process owns the counters; this only gives them names, units and labels. Times are seconds here,
as Prometheus wants them, in the same buckets as everywhere else. Every name on the page stands in the table
of `docs/metrics.md`, and every name of that table on the page: a test compares the two.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
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

from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.draft_metrics import DraftSnapshot
from headway_runtime.engine_options import EngineOptions
from headway_runtime.histograms import EDGES_MILLISECONDS, SIZE_EDGES, HistogramSnapshot, SizeSnapshot
from headway_runtime.offload.counters import OffloadSnapshot
from headway_runtime.parallel.traffic import Traffic
from headway_runtime.server.messages import EngineState
from headway_runtime.start_timeline import STAGES

# Latencies with a target.
JUDGED = ("ttft", "tpot", "e2e")
_EDGE_LABELS = (*(format(edge / 1000.0, ".9g") for edge in EDGES_MILLISECONDS), "+Inf")
_SIZE_LABELS = (*map(str, SIZE_EDGES), "+Inf")
_HISTOGRAMS = {
    "ttft": ("headway_time_to_first_token_seconds", "From request received to first byte written."),
    "queue": ("headway_queue_time_seconds", "From request received to first scheduled."),
    "prefill": ("headway_prefill_time_seconds", "From first scheduled to first token computed."),
    "delivery": ("headway_delivery_time_seconds", "From first token computed to first byte written."),
    "first_decode": ("headway_first_decode_time_seconds", "From first token to second token computed."),
    "tpot": ("headway_time_per_output_token_seconds", "Mean time per token after the first, per request."),
    "inter_token": ("headway_inter_token_latency_seconds", "Between two consecutive tokens of a request."),
    "e2e": ("headway_end_to_end_seconds", "From request received to its last token."),
    "step": ("headway_step_time_seconds", "One step of the engine."),
}
_SIZES = {
    "step_tokens": ("headway_batch_tokens", "Tokens that a step computed."),
    "step_sequences": ("headway_batch_sequences", "Sequences that a step worked on."),
    "prompt_tokens": ("headway_request_prompt_tokens", "Prompt tokens of an accepted request."),
    "generated_tokens": ("headway_request_generated_tokens", "Generated tokens of an accepted request."),
}


def render_metrics(
    state: EngineState, info: dict[str, str], options: EngineOptions, *, is_draining: bool, accept: str
) -> tuple[bytes, str]:
    """The page and its content type, in the format that the Accept header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(state, info, options, is_draining=is_draining))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Page(Collector):
    def __init__(
        self, state: EngineState, info: dict[str, str], options: EngineOptions, *, is_draining: bool
    ) -> None:
        self._state = state
        self._info = info
        self._options = options
        self._is_draining = is_draining

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("headway_runtime", "What is served, and by what.", self._info)
        yield InfoMetricFamily("headway_config", "What the engine was told.", config_labels(self._options))
        yield from self._gauges()
        yield from self._counters()
        yield from _draft_counters(self._state.metrics.drafts)
        yield from _adapter_metrics(self._state.adapters)
        yield from _offload_numbers(self._state.metrics.offload)
        yield from _rank_counters(self._state.metrics.traffic)
        for name, (metric, text) in _HISTOGRAMS.items():
            yield _histogram(metric, text, self._state.metrics.histograms[name])
        for name, (metric, text) in _SIZES.items():
            yield _size_histogram(metric, text, self._state.metrics.sizes[name])

    def _gauges(self) -> Iterator[Metric]:
        state, targets = self._state, self._state.metrics.targets
        plain = (
            ("headway_requests_running", "Requests that hold KV blocks.", state.num_running),
            ("headway_requests_waiting", "Requests that wait to be scheduled.", state.num_waiting),
            ("headway_oldest_waiting_seconds", "Age of the oldest of them.", state.oldest_waiting_seconds),
            ("headway_kv_blocks_used", "KV blocks in use.", state.kv_blocks_used),
            ("headway_kv_blocks_total", "KV blocks there are.", state.kv_blocks_total),
            ("headway_kv_blocks_cached", "KV blocks free but reusable.", state.kv_blocks_cached),
            ("headway_kv_wasted_ratio", "Token slots allocated, but empty.", state.kv_wasted_share),
            ("headway_uptime_seconds", "Since the engine started.", state.uptime_seconds),
            ("headway_model_load_seconds", "What loading the model took.", state.metrics.model_load_seconds),
            ("headway_cuda_graph_bytes", "Memory of recorded decode steps.", state.metrics.cuda_graph_bytes),
            ("headway_draining", "1 while the server ends its work.", int(self._is_draining)),
        )
        for name, text, value in plain:
            yield GaugeMetricFamily(name, text, value)
        start = GaugeMetricFamily("headway_start_seconds", "What the start took.", labels=["stage"])
        for stage in STAGES:
            # A start without a stage spent nothing on it.
            start.add_metric([stage], state.metrics.start_seconds.get(stage, 0.0))
        yield start
        limits = GaugeMetricFamily("headway_limit", "Batch limits in force.", labels=["limit"])
        envelope = GaugeMetricFamily("headway_limit_max", "Upper ends of the limits.", labels=["limit"])
        for limit in ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens"):
            limits.add_metric([limit], getattr(state.limits, limit))
            envelope.add_metric([limit], getattr(state.envelope, limit))
        yield limits
        yield envelope
        target = GaugeMetricFamily("headway_target_seconds", "SLO targets in force.", labels=["target"])
        for name in JUDGED:
            milliseconds = getattr(targets, f"{name}_milliseconds")
            if milliseconds is not None:
                target.add_metric([name], milliseconds / 1000.0)
        yield target
        rate = GaugeMetricFamily("headway_tokens_per_second", "Over the last ten seconds.", labels=["kind"])
        for kind in ("prompt", "generated"):
            rate.add_metric([kind], state.metrics.rates[f"{kind}_tokens"])
        yield rate

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
                for target in JUDGED
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
            "headway_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            counters["cache_queried_tokens"],
        )
        yield CounterMetricFamily(
            "headway_prefix_cache_hits", "Prompt tokens found in it.", counters["cached_tokens"]
        )
        yield CounterMetricFamily(
            "headway_preemptions", "Sequences that lost their blocks.", counters["preemptions"]
        )
        yield _labelled(
            "headway_steps",
            "Steps by how they were launched.",
            ("launch",),
            (
                (("graph",), counters["recorded_steps"]),
                (("kernels",), counters["steps"] - counters["recorded_steps"]),
            ),
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
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def _rank_counters(traffic: Traffic) -> Iterator[Metric]:
    """Of the processes that share the model."""
    yield GaugeMetricFamily(
        "headway_tensor_parallel_size", "Processes that share each layer.", traffic.num_ranks
    )
    yield CounterMetricFamily(
        "headway_rank_exchanges", "Tensors that all ranks added up or gathered.", traffic.num_exchanges
    )
    yield CounterMetricFamily(
        "headway_rank_exchange_bytes", "Bytes of these tensors, as one rank has them.", traffic.num_bytes
    )
    yield CounterMetricFamily(
        "headway_rank_exchange_seconds",
        "Time of these, waiting for the slowest rank included; 0 on a GPU.",
        traffic.seconds,
    )


def _draft_counters(drafts: DraftSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "headway_spec_decode_drafts", "Times that tokens were guessed for a sequence.", drafts.num_drafts
    )
    yield CounterMetricFamily("headway_spec_decode_draft_tokens", "Tokens guessed.", drafts.num_tokens)
    yield CounterMetricFamily(
        "headway_spec_decode_accepted_tokens", "Guessed tokens that came true.", drafts.num_accepted
    )
    yield _labelled(
        "headway_spec_decode_accepted_tokens_per_pos",
        "The same by their place in the guess.",
        ("position",),
        (((str(position),), count) for position, count in enumerate(drafts.accepted_at)),
    )
    yield CounterMetricFamily(
        "headway_spec_decode_seconds",
        "Time of decode steps with guesses, guessing and what a draft reads for it included.",
        drafts.seconds,
    )
    yield CounterMetricFamily(
        "headway_spec_decode_plain_seconds",
        "What the same tokens would have taken without guesses.",
        drafts.plain_seconds,
    )


def _adapter_metrics(adapters: AdapterSnapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "headway_lora_requests_info",
        "Adapters whose requests run or wait, between commas; the value is the time in seconds since 1970.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    info.add_metric(
        [str(adapters.max_loras), ",".join(adapters.running), ",".join(adapters.waiting)], time.time()
    )
    yield info
    loaded = GaugeMetricFamily(
        "headway_lora_loaded", "1 for each adapter that is loaded.", labels=("adapter",)
    )
    for name in adapters.names:
        loaded.add_metric([name], 1)
    yield loaded
    yield GaugeMetricFamily(
        "headway_lora_leaving", "Unloaded adapters that requests still use.", adapters.num_leaving
    )
    yield GaugeMetricFamily("headway_lora_memory_bytes", "Weights of all adapters.", adapters.num_bytes)
    yield _labelled(
        "headway_lora_loads",
        "Adapters that were loaded, or could not be.",
        ("result",),
        ((("loaded",), adapters.num_loaded), (("failed",), adapters.num_failed)),
    )
    yield CounterMetricFamily("headway_lora_unloads", "Adapters that were unloaded.", adapters.num_unloaded)


def _offload_numbers(offload: OffloadSnapshot) -> Iterator[Metric]:
    tiers = {"host": offload.host, "disk": offload.disk}
    for name, text, attribute in (
        ("held_blocks", "KV blocks kept outside of the KV cache.", "held_blocks"),
        ("held_bytes", "What they take.", "held_bytes"),
        ("limit_bytes", "What they may take.", "limit_bytes"),
    ):
        gauge = GaugeMetricFamily(f"headway_kv_offload_{name}", text, labels=["tier"])
        for tier, one in tiers.items():
            gauge.add_metric([tier], getattr(one, attribute))
        yield gauge
    yield _labelled(
        "headway_kv_offload_hit_tokens",
        "Prompt tokens found there, among those found in the prefix cache.",
        ("tier",),
        (((tier,), one.hit_tokens) for tier, one in tiers.items()),
    )
    yield _labelled(
        "headway_kv_offload_evicted_blocks",
        "KV blocks given up there for others.",
        ("tier",),
        (((tier,), one.evicted_blocks) for tier, one in tiers.items()),
    )
    yield _labelled(
        "headway_kv_offload_missed_blocks",
        "KV blocks that were not kept, or not used, and why.",
        ("reason",),
        (
            (("lost",), offload.lost_blocks),
            (("unwritten",), offload.unwritten_blocks),
            (("unread",), offload.unread_blocks),
            (("corrupt",), offload.corrupt_blocks),
        ),
    )
    for name, text, attribute in (
        ("copied_blocks", "KV blocks copied from one tier to another.", "num_blocks"),
        ("bytes", "What they held.", "num_bytes"),
        ("seconds", "What copying them took.", "seconds"),
    ):
        yield _labelled(
            f"headway_kv_offload_{name}",
            text,
            ("transfer_type",),
            (((kind,), getattr(one, attribute)) for kind, one in offload.transfers.items()),
        )


def _histogram(name: str, text: str, histogram: HistogramSnapshot) -> HistogramMetricFamily:
    cumulative = accumulate(histogram.counts)
    return HistogramMetricFamily(
        name,
        text,
        buckets=list(zip(_EDGE_LABELS, cumulative, strict=True)),
        sum_value=histogram.sum_milliseconds / 1000.0,
    )


def _size_histogram(name: str, text: str, histogram: SizeSnapshot) -> HistogramMetricFamily:
    cumulative = accumulate(histogram.counts)
    return HistogramMetricFamily(
        name,
        text,
        buckets=list(zip(_SIZE_LABELS, cumulative, strict=True)),
        sum_value=histogram.sum,
    )


def config_labels(options: EngineOptions) -> dict[str, str]:
    """One label per option of a single value; limits and targets may change and have their own metrics."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {
        name: "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if name != "model_path" and not is_dataclass(value)
    }
