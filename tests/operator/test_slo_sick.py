"""A replica judged by its own counters: since a mark, across restarts, and only by the targets of today."""

from typing import Any

import pytest

from headway_operator.samples import Limits, Sample, Targets
from headway_operator.slo import marks
from headway_operator.slo.baselines import Baseline, of_replica
from headway_operator.slo.forecast import Forecast
from headway_operator.slo.memory import Memory
from headway_operator.slo.sick import sick

NOW = 1000.0
EXPECTED = Forecast(1.0, 1.0, 1.0)


class Case:
    """Replicas by what each counted since the mark, (met, missed) of TTFT."""

    def __init__(self, build: Any, **counted: tuple[int, int]) -> None:
        self.build, self.counted = build, counted
        self.target = build.target()
        self.before: dict[str, dict[str, int]] = {}
        self.changes: dict[str, dict[str, Any]] = {}
        self.broken = ["ttft"]
        self.seconds = 90.0
        self.since = 0.0

    def baseline(self, name: str, counters: dict[str, int], **changes: Any) -> Baseline:
        return of_replica(self.sample(name, counters, **changes))

    def sample(self, name: str, counters: dict[str, int], **changes: Any) -> Any:
        given = {"limits": Limits(8, 512), "targets": self.target.targets, "instance": name}
        return self.build.sample(NOW, **{**given, **changes}, counters=counters)

    def found(self) -> str:
        past = {name: self.before.get(name, {"ttft_met": 500, "ttft_missed": 20}) for name in self.counted}
        counters = {
            name: {
                "ttft_met": past[name].get("ttft_met", 0) + met,
                "ttft_missed": past[name].get("ttft_missed", 0) + missed,
            }
            for name, (met, missed) in self.counted.items()
        }
        mark = marks.with_mark(
            (), {name: self.baseline(name, past[name]) for name in past}, NOW - self.seconds
        )
        samples = {name: self.sample(name, counters[name], **self.changes.get(name, {})) for name in counters}
        memory = Memory(marks=mark, baselines={name: of_replica(one) for name, one in samples.items()})
        return sick(self.target, memory, Sample(NOW, samples), None, EXPECTED, self.broken, self.since, NOW)


def test_who_misses_alone_is_named_with_its_numbers(build: Any) -> None:
    assert Case(build, a=(5, 15), b=(60, 1), c=(60, 1)).found() == (
        "a in 15 of 20 requests of the last 90 s misses the TTFT target while the other 2 keep it with room "
        "for the whole load: look at the node, the device and the log, or delete the pod"
    )
    assert "b in 9 of 9 requests of the last 90 s misses" in Case(build, a=(40, 1), b=(0, 9)).found()


@pytest.mark.parametrize(
    "counted",
    [
        pytest.param({"a": (5, 15), "b": (5, 15), "c": (60, 1), "d": (60, 1)}, id="half of them"),
        pytest.param({"a": (5, 15), "b": (60, 8)}, id="the others miss, too"),
        pytest.param({"a": (5, 15), "b": (10, 0)}, id="the others say too little"),
        pytest.param({"a": (18, 2), "b": (60, 1)}, id="no more than chance"),
    ],
)
def test_nobody_is_named_without_proof(build: Any, counted: dict[str, tuple[int, int]]) -> None:
    assert not Case(build, **counted).found()


def test_a_quarter_of_a_large_fleet_may_be_sick(build: Any) -> None:
    well = {f"w{number}": (30, 0) for number in range(6)}
    assert Case(build, a=(0, 9), b=(0, 9), **well).found().startswith("a in 9 of 9, b in 9 of 9 requests")
    assert not Case(build, a=(0, 9), b=(0, 9), c=(0, 9), **well).found()


def test_what_waits_for_too_long_counts_although_nothing_ends(build: Any) -> None:
    case = Case(build, a=(0, 0), b=(60, 1), c=(60, 1))
    case.changes["a"] = {"waiting": 6, "oldest_waiting_seconds": 60.0, "running": 2}
    assert case.found().startswith("a in 6 of 6 requests")


def test_without_room_elsewhere_it_is_a_matter_of_load(build: Any) -> None:
    case = Case(build, a=(5, 15), b=(60, 1))
    case.changes["b"] = {"running": 8}
    assert not case.found()
    case.changes["b"] = {"waiting": 3}
    assert not case.found()


def test_while_the_promise_is_kept_nobody_is_asked(build: Any) -> None:
    case = Case(build, a=(5, 15), b=(60, 1))
    case.broken = []
    assert not case.found()


@pytest.mark.parametrize("seconds", [10.0, 200.0])
def test_a_mark_too_young_or_too_old_says_nothing(build: Any, seconds: float) -> None:
    case = Case(build, a=(5, 15), b=(60, 1))
    case.seconds = seconds
    assert not case.found()


def test_what_was_counted_before_the_last_change_says_nothing(build: Any) -> None:
    case = Case(build, a=(5, 15), b=(60, 1))
    case.since = NOW - 80.0
    assert not case.found()


def test_a_restart_counts_from_zero_and_other_targets_do_not_count(build: Any) -> None:
    case = Case(build, a=(5, 15), b=(60, 1))
    case.changes["a"] = {"instance": "another"}
    assert case.found().startswith("a in 35 of 540")
    case.changes["a"] = {"targets": Targets(100.0, 40.0)}
    assert not case.found()


def test_whose_totals_fell_without_a_restart_is_judged_by_none_of_them(build: Any) -> None:
    case = Case(build, a=(5, 15), b=(60, 1))
    case.before["a"] = {"ttft_met": 500, "ttft_missed": 20, "rejected": 7}
    assert not case.found()


def test_two_marks_a_minute_apart_are_kept(build: Any) -> None:
    baselines = {"a": of_replica(build.sample(NOW))}
    kept: tuple[marks.Mark, ...] = ()
    for second in range(0, 301, 5):
        kept = marks.with_mark(kept, baselines, NOW + second)
        assert len(kept) <= marks.NUM_MARKS
        oldest = marks.usable(kept, NOW + second, 0.0)
        assert (oldest is None) == (second < 30)
        assert oldest is None or 30 <= NOW + second - oldest.at <= 120
