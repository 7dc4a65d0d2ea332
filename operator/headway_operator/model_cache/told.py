"""The status of a ModelCache, and which of its changes are worth an event."""

from collections.abc import Mapping
from typing import Any

from headway_operator.conditions import Event, Problems
from headway_operator.conditions.condition import Condition, written
from headway_operator.manifests.cache_claim import claim_name
from headway_operator.model_cache.content import as_status
from headway_operator.model_cache.course import EVERYDAY_REASONS, Course, percent
from headway_operator.model_cache.facts import Fetch, ObservedCache
from headway_operator.spec import ModelCache

MAX_SERVICES = 64


def status(
    course: Course,
    previous: Mapping[str, Any],
    generation: int,
    now: float,
    observed: ObservedCache | None = None,
    cache: ModelCache | None = None,
    problems: Problems | None = None,
) -> dict[str, Any]:
    """The whole status. cache, observed: None where the spec could not be read, or nothing be observed.

    problems: of this pass, told by the condition Degraded.
    """
    conditions = [course.ready, _degraded(course, problems)]
    made: dict[str, Any] = {
        "observedGeneration": generation,
        "conditions": written(conditions, previous.get("conditions") or [], generation, now),
        "display": _display(course),
    }
    if cache is not None:
        made["claimName"] = claim_name(cache)
    if course.content is not None:
        made["fetched"] = as_status(course.content)
    if course.fetch is not None:
        made["progress"] = _progress(course.fetch)
    if observed is not None and observed.services:
        made["services"] = list(observed.services[:MAX_SERVICES])
    return made


def _degraded(course: Course, problems: Problems | None) -> Condition:
    if problems is not None and problems.messages:
        message = f"{problems.messages[0]}; it is tried again"
        return Condition("Degraded", "True", problems.reason, message)
    if course.is_failing:
        return Condition("Degraded", "True", course.ready.reason, course.ready.message)
    return Condition("Degraded", "False", "AsExpected", "nothing is wrong")


def _progress(fetch: Fetch) -> dict[str, Any]:
    facts = {
        "bytes": fetch.bytes,
        "totalBytes": fetch.total_bytes,
        "percent": percent(fetch),
        "failedAttempts": fetch.failed_attempts,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _display(course: Course) -> dict[str, str]:
    if course.ready.status == "True" and course.content is not None:
        return {"size": size_text(course.content.bytes), "progress": "100%"}
    share = None if course.fetch is None else percent(course.fetch)
    total = None if course.fetch is None else course.fetch.total_bytes
    return {
        "size": "-" if not total else size_text(total),
        "progress": "-" if share is None else f"{share}%",
    }


def size_text(num_bytes: int) -> str:
    """Three digits and a unit, as disks are sold."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= 0.9995 * factor:  # what would be rounded up to it
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def events(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """Ready where it flipped or has another cause; that nothing is wrong is none."""
    before = {one["type"]: one for one in previous.get("conditions") or ()}
    told: list[Event] = []
    for condition in new["conditions"]:
        kind, reason = condition["type"], condition["reason"]
        old = before.get(kind, {})
        if (old.get("status"), old.get("reason")) == (condition["status"], reason):
            continue
        if kind == "Degraded" and (condition["status"] != "True" or any(one[1] == reason for one in told)):
            continue
        is_bad = kind == "Degraded" or reason not in EVERYDAY_REASONS
        words = f"{kind} is {condition['status']}: {condition['message']}"
        told.append(("Warning" if is_bad else "Normal", reason, words))
    return told
