"""The report as JSON, for programs: all numbers, thresholds and changed answers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway_eval.options import EvalOptions
from headway_eval.session import EvalResult
from headway_eval.side import Side
from headway_eval.task_run import SuiteResult
from headway_eval.task_summary import TaskSummary

SCHEMA_VERSION = 1


def build_report(options: EvalOptions, result: EvalResult) -> dict[str, Any]:
    report = {
        "schema_version": SCHEMA_VERSION,
        "passed": result.verdict.passed,
        "model": _side(options.model),
        "baseline": _side(options.baseline),
        "thresholds": asdict(options.thresholds),
        "checks": [asdict(check) for check in result.verdict.checks],
        "text": None,
        "tasks": [_suite(one) for one in result.suites],
    }
    if result.text is not None and options.text is not None:
        text = options.text
        report["text"] = {
            "name": text.name,
            "window_tokens": text.window_tokens,
            "stride_tokens": text.stride_tokens,
            "chunk_tokens": text.chunk_tokens,
            **asdict(result.text),
        }
    return report


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(finite(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _side(side: Side) -> dict[str, Any]:
    return {"source": side.source, **side.levers()}


def _suite(result: SuiteResult) -> dict[str, Any]:
    return {
        **_summary(result.summary.whole),
        "kinds": [_summary(kind) for kind in result.summary.kinds],
        "changed": [asdict(one) for one in result.changed],
    }


def _summary(summary: TaskSummary) -> dict[str, Any]:
    return {
        **asdict(summary),
        "model_accuracy": summary.model_accuracy,
        "model_interval": summary.model_interval,
        "baseline_accuracy": summary.baseline_accuracy,
        "baseline_interval": summary.baseline_interval,
        "drop_points": summary.drop_points,
        "probability_by_chance": summary.probability_by_chance,
    }


def finite(value: Any) -> Any:
    """JSON knows neither infinity nor NaN: texts stand for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(one) for one in value]
    return value
