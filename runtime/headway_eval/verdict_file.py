"""The verdict as one line of JSON that fits a container's termination message, for an operator to read.

Kubernetes keeps 4,096 bytes of what a container leaves behind, so this has the numbers and no answers. What
does not fit is left out in this order: notes, tasks, the checks that were passed, and then the last of those
that failed; `left_out` counts the checks that are not there.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headway_eval.options import EvalOptions
from headway_eval.report import finite
from headway_eval.session import EvalResult
from headway_eval.suite_names import numbered

SCHEMA_VERSION = 1
MAX_BYTES = 4096
SIGNIFICANT_DIGITS = 6
MAX_NAME_CHARACTERS = 60
MAX_NOTE_CHARACTERS = 120


def write_verdict(path: Path, options: EvalOptions, result: EvalResult) -> None:
    """In place: the path may be a mount, which no other file can be renamed to."""
    path.write_bytes(encode(build_verdict(options, result)))


def build_verdict(options: EvalOptions, result: EvalResult) -> dict[str, Any]:
    """Every number that a condition or a status has a place for."""
    text, checks = result.text, result.verdict.checks
    wholes = [suite.summary.whole for suite in result.suites]
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": result.verdict.passed,
        "checks": [
            {
                "name": name,
                "value": check.value,
                "limit": check.limit,
                "unit": check.unit,
                "passed": check.passed,
                "note": check.note[:MAX_NOTE_CHARACTERS],
            }
            for name, check in zip(_short(one.name for one in checks), checks, strict=True)
        ],
        "text": None
        if text is None or options.text is None
        else {
            "name": _short([options.text.name])[0],
            "tokens": text.num_tokens,
            "perplexity": text.model_perplexity,
            "baseline_perplexity": text.baseline_perplexity,
            "mean_kl": text.mean_kl,
            "p99_kl": text.p99_kl,
            "same_choice_share": text.same_choice_share,
        },
        "tasks": [
            {
                "name": name,
                "tasks": whole.num_tasks,
                "right": whole.model_right,
                "baseline_right": whole.baseline_right,
                "lost": whole.num_lost,
                "won": whole.num_won,
            }
            for name, whole in zip(_short(one.name for one in wholes), wholes, strict=True)
        ],
        "left_out": 0,
    }


def encode(verdict: dict[str, Any]) -> bytes:
    """As much of it as fits."""
    return next(line for line in _shorter_and_shorter(verdict) if len(line) <= MAX_BYTES)


def _shorter_and_shorter(verdict: dict[str, Any]) -> Iterator[bytes]:
    checks = verdict["checks"]
    yield _line(verdict)
    bare = [{name: value for name, value in check.items() if name != "note"} for check in checks]
    yield _line({**verdict, "checks": bare})
    yield _line({**verdict, "checks": bare, "tasks": []})
    failed = [check for check in bare if not check["passed"]]
    for count in range(len(failed), -1, -1):
        left_out = len(checks) - count
        yield _line({**verdict, "checks": failed[:count], "tasks": [], "left_out": left_out})


def _line(verdict: dict[str, Any]) -> bytes:
    return json.dumps(_rounded(finite(verdict)), ensure_ascii=False, separators=(",", ":")).encode()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return value


def _short(names: Iterable[str]) -> list[str]:
    return numbered(list(names), MAX_NAME_CHARACTERS)
