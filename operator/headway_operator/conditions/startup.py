"""The timeline of the latest starts, as status keeps it: where the time went until a replica could answer.

    scheduled | pulled | fetched | loaded | warm

The cluster tells when a pod had a node, when its container began and when it was ready; the replica tells
what its engine's start took, by stage. What is left of the container's own time belongs to fetching where the
model has to be fetched, else to loading: it is the interpreter's start.

A start is recorded once, under the replica's name: readiness that comes and goes later changes nothing in it,
and a replica that is gone still counts until newer ones have taken its place.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from headway_operator.manifests.model_source import has_to_be_fetched
from headway_operator.samples import Sample
from headway_operator.spec import Service
from headway_operator.state import Observed, Replica
from headway_operator.times import timestamp

MAX_RECENT = 8
# Stages that the runtime states (`headway_start_seconds`); all others load the model.
WARM_STAGES = frozenset(("profile", "graphs", "ready"))
# A replica that has not told its stages by then is recorded without them.
STAGES_PATIENCE_SECONDS = 60.0
SECONDS = (
    "scheduledSeconds",
    "pulledSeconds",
    "fetchedSeconds",
    "loadedSeconds",
    "warmSeconds",
    "totalSeconds",
)


def startup(service: Service, observed: Observed, sample: Sample, now: float) -> dict[str, Any]:
    """`status.startup`: the latest starts, the newest first, and the median of each number over them."""
    recent = list((service.status.get("startup") or {}).get("recent") or ())
    known = {one["replica"] for one in recent}
    is_remote = has_to_be_fetched(service.spec)
    new = [
        _record(replica, sample.start_stages.get(replica.name, {}), is_remote=is_remote)
        for replica in sorted(observed.replicas, key=lambda one: (one.ready_at or 0.0, one.name))
        if replica.name not in known and _is_told(replica, sample, now)
    ]
    recent = [*reversed(new), *recent][:MAX_RECENT]
    if not recent:
        return {}
    numbers = {name: [one[name] for one in recent if name in one] for name in SECONDS}
    median = {name: round(statistics.median(values), 1) for name, values in numbers.items() if values}
    return {"recent": recent, "median": median}


def longest_start_seconds(service: Service) -> float:
    """What the slowest of the latest starts took, as status has it; 0 before there was one."""
    recent = (service.status.get("startup") or {}).get("recent") or ()
    return max((float(one.get("totalSeconds", 0.0)) for one in recent), default=0.0)


def _is_told(replica: Replica, sample: Sample, now: float) -> bool:
    if replica.phase != "ready" or replica.start is None or replica.ready_at is None:
        return False
    return replica.name in sample.start_stages or now - replica.ready_at > STAGES_PATIENCE_SECONDS


def _record(replica: Replica, stages: Mapping[str, float], *, is_remote: bool) -> dict[str, Any]:
    start = replica.start
    assert start is not None, "only starts that are known are recorded"
    assert replica.ready_at is not None, "and of replicas that became ready"
    seconds = {
        "scheduledSeconds": start.scheduled_seconds,
        "pulledSeconds": start.pulled_seconds,
        "totalSeconds": start.scheduled_seconds
        + start.pulled_seconds
        + start.initialized_seconds
        + start.served_seconds,
    }
    if stages:
        warm = sum(value for stage, value in stages.items() if stage in WARM_STAGES)
        loaded = sum(stages.values()) - warm
        rest = max(0.0, start.served_seconds - warm - loaded)
        seconds["fetchedSeconds"] = start.initialized_seconds + (rest if is_remote else 0.0)
        seconds["loadedSeconds"] = loaded + (0.0 if is_remote else rest)
        seconds["warmSeconds"] = warm
    return {
        "replica": replica.name,
        "readyAt": timestamp(replica.ready_at),
        **{name: round(seconds[name], 1) for name in SECONDS if name in seconds},
    }
