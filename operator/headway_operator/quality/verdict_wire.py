"""What `headway eval --verdict-file` writes, version 1, and how it is read.

A verdict is taken whole or not at all. Pure.
"""

from typing import Any

import msgspec
from msgspec import Struct

from headway_operator.quality.judgement import Check, TaskNumbers, TextNumbers

VERDICT_VERSION = 1


class Verdict(Struct, frozen=True, rename="camel"):
    """left_out: checks for which there was no room."""

    schema_version: int
    passed: bool
    checks: tuple[Check, ...]
    tasks: tuple[TaskNumbers, ...]
    left_out: int
    text: TextNumbers | None = None


def read_verdict(output: str) -> Verdict | None:
    """None for what is no verdict: the last words of an evaluation that came to none, or nothing."""
    try:
        verdict = msgspec.convert(_by_our_names(msgspec.json.decode(output)), Verdict)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return verdict if verdict.schema_version == VERDICT_VERSION else None


def _by_our_names(value: Any) -> Any:
    """camelCase for snake_case; what was not finite, which JSON has as a text, is left out."""
    if isinstance(value, dict):
        return {
            _camel(name): _by_our_names(one)
            for name, one in value.items()
            if one not in ("nan", "inf", "-inf")
        }
    return [_by_our_names(one) for one in value] if isinstance(value, list) else value


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
