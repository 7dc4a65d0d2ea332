"""Where the time of starts went, as status keeps it."""

from typing import Any

from headway_operator.conditions.startup import MAX_RECENT, STAGES_PATIENCE_SECONDS, startup
from headway_operator.samples import Sample
from headway_operator.spec import parse
from headway_operator.state import Observed, Replica, Start

NOW = 1_800_000_000.0
STAGES = {
    "imports": 2.0,
    "config": 0.5,
    "read": 6.0,
    "copy": 1.5,
    "profile": 3.0,
    "graphs": 4.0,
    "ready": 1.0,
}


def told(
    build: Any,
    *replicas: Replica,
    stages: dict[str, Any] | None = None,
    before: dict[str, Any] | None = None,
    source: str = "bundled://headway-tiny",
    now: float = NOW,
) -> dict[str, Any]:
    manifest = build.manifest({"model": {"source": source}}) | {"status": {"startup": before or {}}}
    sample = Sample(now, start_stages={} if stages is None else stages)
    return startup(parse(manifest), Observed(replicas=replicas), sample, now)


def started(build: Any, name: str = "a", ready_at: float = NOW - 5, start: Start | None = None) -> Replica:
    replica: Replica = build.replica(name, ready_at=ready_at, start=start or Start(1.0, 11.0, 0.0, 20.0))
    return replica


def test_the_parts_of_a_start_add_up_to_it(build: Any) -> None:
    (one,) = told(build, started(build), stages={"a": STAGES})["recent"]
    assert one == {
        "replica": "a",
        "readyAt": "2027-01-15T07:59:55Z",
        "scheduledSeconds": 1.0,
        "pulledSeconds": 11.0,
        "fetchedSeconds": 0.0,
        "loadedSeconds": 12.0,  # 10 s of its stages, 2 s of the interpreter
        "warmSeconds": 8.0,
        "totalSeconds": 32.0,
    }


def test_what_a_remote_model_took_beside_loading_was_fetching(build: Any) -> None:
    start = Start(1.0, 11.0, 3.0, 60.0)
    replica = started(build, start=start)
    (one,) = told(build, replica, stages={"a": STAGES}, source="hf://org/name")["recent"]
    assert (one["fetchedSeconds"], one["loadedSeconds"], one["warmSeconds"]) == (3.0 + 42.0, 10.0, 8.0)
    assert one["totalSeconds"] == 75.0


def test_a_start_is_recorded_once_it_has_told_its_stages_or_in_time_without(build: Any) -> None:
    replica = started(build)
    assert told(build, replica) == {}
    late = told(build, replica, now=NOW - 5 + STAGES_PATIENCE_SECONDS + 1)
    assert "loadedSeconds" not in late["recent"][0]
    assert "loadedSeconds" not in late["median"]
    assert late["recent"][0]["totalSeconds"] == 32.0
    assert "loadedSeconds" not in told(build, replica, stages={"a": {}})["recent"][0]


def test_readiness_that_comes_and_goes_changes_nothing(build: Any) -> None:
    first = told(build, started(build), stages={"a": STAGES})
    again = started(build, ready_at=NOW + 500, start=Start(1.0, 11.0, 0.0, 525.0))
    assert told(build, again, stages={"a": STAGES}, before=first, now=NOW + 510) == first
    gone = build.replica("a", phase="starting", ready_at=None)
    assert told(build, gone, before=first) == first


def test_the_latest_starts_are_kept_newest_first_with_their_median(build: Any) -> None:
    status: dict[str, Any] = {}
    for number in range(MAX_RECENT + 3):
        start = Start(float(number), 10.0, 0.0, 20.0)
        replica = started(build, f"r{number}", NOW + number, start)
        status = told(build, replica, stages={f"r{number}": STAGES}, before=status)
    names = [one["replica"] for one in status["recent"]]
    assert names == [f"r{number}" for number in range(MAX_RECENT + 2, 2, -1)]
    assert status["median"]["scheduledSeconds"] == 6.5  # of 3 to 10
    assert status["median"]["pulledSeconds"] == 10.0


def test_several_that_became_ready_at_once_are_in_order(build: Any) -> None:
    replicas = [started(build, "b", NOW - 1), started(build, "a", NOW - 2)]
    both = told(build, *replicas, stages={"a": STAGES, "b": STAGES})
    assert [one["replica"] for one in both["recent"]] == ["b", "a"]


def test_what_was_never_seen_to_start_is_not_told(build: Any) -> None:
    assert told(build, build.replica("a", ready_at=NOW - 100)) == {}
