"""Sizes in powers of two, and rates over the last whole seconds."""

import pytest

from headway_runtime.histograms import RATE_WINDOW_SECONDS, SIZE_EDGES, RateWindow, SizeHistogram


@pytest.mark.parametrize(
    ("size", "bucket"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (2**17, 17), (2**17 + 1, 18)]
)
def test_a_size_is_counted_in_the_first_bucket_whose_edge_is_not_below_it(size: int, bucket: int) -> None:
    histogram = SizeHistogram()
    histogram.observe(size)
    snapshot = histogram.snapshot()
    assert len(snapshot.counts) == len(SIZE_EDGES) + 1
    assert [index for index, count in enumerate(snapshot.counts) if count] == [bucket]
    assert snapshot.sum == size


class Clock:
    def __init__(self, now: float = 1000.5) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_rate_is_of_whole_seconds_and_leaves_the_running_one_out() -> None:
    clock = Clock()
    window = RateWindow(clock)
    for _ in range(30):
        window.add(50)
        clock.now += 0.5
    assert window.per_second() == 100.0
    clock.now += 0.25
    assert window.per_second() == 100.0, "it does not dip within a second"


def test_a_rate_falls_to_nothing_once_nothing_comes() -> None:
    clock = Clock()
    window = RateWindow(clock)
    window.add(500)
    assert window.per_second() == 0.0, "the running second is not over"
    clock.now += 1
    assert window.per_second() == 500 / RATE_WINDOW_SECONDS
    clock.now += RATE_WINDOW_SECONDS - 1
    assert window.per_second() == 500 / RATE_WINDOW_SECONDS
    clock.now += 1
    assert window.per_second() == 0.0


def test_a_long_silence_leaves_nothing_old_behind() -> None:
    clock = Clock()
    window = RateWindow(clock)
    for _ in range(20):
        window.add(7)
        clock.now += 1
    clock.now += 12345
    window.add(3)
    assert window.per_second() == 0.0
    clock.now += 1
    assert window.per_second() == 3 / RATE_WINDOW_SECONDS
