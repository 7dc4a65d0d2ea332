"""A judgement and its numbers, as status keeps them and as they are said in one sentence.

The structures are those of `status.quality`, camelCase outside. A number that was not finite is absent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

Reason = Literal["Passed", "Failed", "TimedOut", "JobFailed"]
Unit = Literal["nats", "share", "points"]


class Check(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One number against its limit. unit: of both; a share of 0.01 is one percent."""

    name: str
    limit: float
    passed: bool
    unit: Unit
    value: float | None = None
    note: str = ""


class TextNumbers(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What the scored text came to."""

    name: str
    tokens: int
    perplexity: float | None = None
    baseline_perplexity: float | None = None
    mean_kl: float | None = None
    p99_kl: float | None = None
    same_choice_share: float | None = None


class TaskNumbers(Struct, frozen=True, rename="camel"):
    """What one file of tasks came to. lost: tasks that only the baseline got right; won: only the model."""

    name: str
    tasks: int
    right: int
    baseline_right: int
    lost: int
    won: int


class Judgement(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The end of one evaluation. hash: of what was judged. finished_at: as Kubernetes writes times."""

    hash: str
    reason: Reason
    message: str
    finished_at: str
    checks: tuple[Check, ...] = ()
    text: TextNumbers | None = None
    tasks: tuple[TaskNumbers, ...] = ()

    @property
    def is_verdict(self) -> bool:
        """Whether it says something of the model, and not only that nothing could be said."""
        return self.reason in ("Passed", "Failed")


def recorded(status: Mapping[str, Any]) -> tuple[Judgement, ...]:
    """Those that status has, the newest first; what cannot be read was not judged."""
    result = []
    for record in (status.get("quality") or {}).get("history") or ():
        try:
            result.append(msgspec.convert(record, Judgement))
        except msgspec.ValidationError:
            continue
    return tuple(result)


def as_status(judgement: Judgement) -> dict[str, Any]:
    """The reverse."""
    result: dict[str, Any] = msgspec.to_builtins(judgement)
    return result


def in_words(checks: Sequence[Check], num_left_out: int = 0) -> str:
    """Each number beside its limit, those that failed first."""
    ordered = sorted(checks, key=lambda check: check.passed)
    parts = [_words(check) for check in ordered]
    if num_left_out:
        parts.append(f"{num_left_out} more checks")
    return "; ".join(parts)


def _words(check: Check) -> str:
    measured = "not finite" if check.value is None else _number(check.value, check.unit)
    relation = "at most" if check.passed else "above the limit of"
    note = f" ({check.note})" if check.note else ""
    return f"{check.name} {measured}, {relation} {_number(check.limit, check.unit)}{note}"


def _number(value: float, unit: Unit) -> str:
    if unit == "share":
        return f"{100 * value:.2f}%"
    return f"{value:.1f} points" if unit == "points" else f"{value:.3g} nats"
