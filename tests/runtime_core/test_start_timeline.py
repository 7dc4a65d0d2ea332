"""Stages of a start and what they took."""

import pytest

from headway_runtime.start_timeline import StartTimeline


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_stages_are_told_with_their_seconds_and_rates() -> None:
    clock = Clock()
    timeline = StartTimeline(clock)
    clock.now += 0.25
    timeline.ended("config")
    clock.now += 4.0
    timeline.ended_in_parts({"read": 2.0, "copy": 1.0}, "repack", {"read": 16_000_000_000})
    clock.now += 0.5
    timeline.ended("graphs")
    timeline.add("imports", 1.5)

    assert timeline.seconds == {
        "config": 0.25,
        "read": 2.0,
        "copy": 1.0,
        "repack": 1.0,
        "graphs": 0.5,
        "imports": 1.5,
    }
    assert timeline.told() == (
        "started in 6.25 s: imports 1.50 s, config 0.25 s, read 2.00 s (16.00 GB, 8.0 GB/s), copy 1.00 s, "
        "repack 1.00 s, graphs 0.50 s"
    )


def test_parts_never_take_longer_than_there_was_time() -> None:
    clock = Clock()
    timeline = StartTimeline(clock)
    clock.now += 1.0
    timeline.ended_in_parts({"read": 0.75, "copy": 0.75}, "repack", {})

    assert timeline.seconds == {"read": 0.75, "copy": 0.25, "repack": 0.0}


def test_a_stage_that_comes_again_is_added() -> None:
    clock = Clock()
    timeline = StartTimeline(clock)
    for _ in range(2):
        clock.now += 1.0
        timeline.ended("read", 5)

    assert timeline.seconds == {"read": 2.0}
    assert timeline.num_bytes == {"read": 10}


def test_a_stage_that_nobody_knows_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        StartTimeline().ended("reading")
