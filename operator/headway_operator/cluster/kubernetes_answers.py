"""What the API server's refusals mean: which of our errors, how long to wait before asking again. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from headway_operator.errors import (
    AbsentError,
    AdmissionError,
    ClusterError,
    ConflictError,
    FieldConflictError,
    ForbiddenError,
    UnavailableError,
    is_refused_by_admission,
)

TOO_MANY_REQUESTS = 429
RETRIED_LATER = frozenset((408, TOO_MANY_REQUESTS, 500, 502, 503, 504))
# A server that asks for more is not believed: leadership and liveness would not survive it.
MAX_WAIT_SECONDS = 60.0
# What one waits for after a 429 that does not say it.
DEFAULT_WAIT_SECONDS = 1.0
MAX_TEXT_CHARACTERS = 200


def error_of(what: str, status: int, raw: bytes) -> ClusterError:
    """The error for an answer that is no success. what: the call; raw: the body, a Status as a rule."""
    told = _status(raw)
    message = str(told.get("message") or raw[:MAX_TEXT_CHARACTERS].decode(errors="replace"))
    text = f"{what}: {status}: {message}"
    if status == 409:
        return _conflict(text, told)
    if is_refused_by_admission(message) or (status == 403 and "exceeded quota" in message):
        return AdmissionError(text)
    if status in (401, 403):
        return ForbiddenError(text)
    if status == 404:
        return AbsentError(text)
    return UnavailableError(text) if status in RETRIED_LATER else ClusterError(text)


def retry_after_seconds(status: int, headers: Mapping[str, str]) -> float:
    """How long the server asks to wait; 0 when it does not. It does with 429 and, starting or ending, 503."""
    if status not in (TOO_MANY_REQUESTS, 503):
        return 0.0
    told = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    if not told.isdigit():  # absent, or a date, which the API server never writes
        return DEFAULT_WAIT_SECONDS if status == TOO_MANY_REQUESTS else 0.0
    return min(float(told), MAX_WAIT_SECONDS)


def _conflict(text: str, told: Mapping[str, Any]) -> ClusterError:
    causes = (told.get("details") or {}).get("causes") or ()
    conflicts = [one for one in causes if one.get("reason") == "FieldManagerConflict"]
    if not conflicts:
        return ConflictError(text)
    # `conflict with "kubectl-edit" using apps/v1 at 2026-...`
    managers = {
        str(one.get("message", "")).split('"')[1] for one in conflicts if '"' in one.get("message", "")
    }
    fields = {str(one.get("field", "")) for one in conflicts}
    return FieldConflictError(text, tuple(sorted(managers)), tuple(sorted(fields)))


def _status(raw: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(raw)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
