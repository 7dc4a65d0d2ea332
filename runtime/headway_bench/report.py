"""The report as JSON. `SCHEMA` names its version; docs/bench.md tells its fields.

A field may be added within a version; one that is renamed, removed or measured otherwise makes a new version.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway_bench.config import BenchConfig
from headway_bench.record import Record
from headway_bench.session import PointResult, SessionResult
from headway_bench.warnings_of import warnings_of

SCHEMA = "headway-bench/1"


def build_report(
    config: BenchConfig,
    result: SessionResult,
    conditions_before: Mapping[str, Any],
    started_at: str,
    ended_at: str,
) -> dict[str, Any]:
    """Everything that was asked, measured and known."""
    material = result.material
    return {
        "schema": SCHEMA,
        "conditions": {
            "command": config.command,
            "seed": config.seed,
            "started_at": started_at,
            "ended_at": ended_at,
            "was_interrupted": result.was_interrupted,
            "client": dict(conditions_before),
            "server": {
                "base_url": config.server.base_url,
                "endpoint": config.server.endpoint,
                "model": material.facts.model,
                "version": material.facts.version,
                "server_header": material.facts.server_header,
            },
            "prompt_lengths": material.writer.length_source,
            "prompt_overhead_tokens": material.overhead_tokens,
            "stream_options": material.first.stream_options,
        },
        "workload": _workload(config),
        "points": [_point(config, point) for point in result.points],
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """As one JSON document."""
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _workload(config: BenchConfig) -> dict[str, Any]:
    load, prompts = config.load, config.prompts
    return {
        "arrivals": load.arrivals if not load.concurrencies else None,
        "burstiness": load.burstiness,
        "ramp_seconds": load.ramp_seconds,
        **asdict(load.extent),
        "input_length": None if prompts.input_length is None else prompts.input_length.text,
        "output_length": None if prompts.output_length is None else prompts.output_length.text,
        "turns": prompts.turns.text,
        "think_seconds": prompts.think_seconds.text,
        "num_prefixes": prompts.num_prefixes,
        "prefix_length": prompts.prefix_length,
        "dataset": None if prompts.dataset is None else prompts.dataset.name,
        "trace": None if prompts.trace is None else prompts.trace.name,
        "replay": _finite(asdict(prompts.replay)) if prompts.trace is not None else None,
        "ignore_eos": config.server.ignore_eos,
        "stream": config.server.stream,
        "temperature": config.server.temperature,
        "extra_body": dict(config.server.extra_body),
        "request_timeout_seconds": config.server.timeout_seconds,
        "confidence": config.report.confidence,
    }


def _point(config: BenchConfig, result: PointResult) -> dict[str, Any]:
    point = {
        **_finite({"request_rate": result.point.request_rate, "concurrency": result.point.concurrency}),
        "mode": "closed loop" if result.point.concurrency is not None else "open loop",
        "num_prepared": result.num_prepared,
        "summary": asdict(result.summary),
        "warnings": warnings_of(result.summary),
    }
    if config.report.with_requests:
        start = min((record.due_at for record in result.records), default=0.0)
        point["requests"] = [_request(record, start) for record in result.records]
    return point


def _request(record: Record, start: float) -> dict[str, Any]:
    """One request; times in milliseconds from the point's first due time."""

    def milliseconds(at_seconds: float) -> float:
        return round(1000 * (at_seconds - start), 4)

    return {
        "conversation": record.conversation,
        "turn": record.turn,
        "is_warmup": record.is_warmup,
        "due": milliseconds(record.due_at),
        "sent": milliseconds(record.sent_at),
        "ended": milliseconds(record.ended_at),
        "event_times": [milliseconds(at) for at in record.token_times],
        "event_tokens": list(record.token_counts),
        "counted_by": record.count_source,
        "input_tokens_wanted": record.input_tokens_wanted,
        "output_tokens_wanted": record.output_tokens_wanted,
        "input_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "status": record.status,
        "failure": record.failure,
        "failure_detail": record.failure_detail,
    }


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: "inf" stands for it."""
    return {
        name: "inf" if isinstance(value, float) and math.isinf(value) else value
        for name, value in fields.items()
    }
