"""When steps go back to one thread, and when they get all of them again."""

from pathlib import Path

from headway_runtime.thread_governor import (
    FIRST_HOLD_SECONDS,
    LONGEST_HOLD_SECONDS,
    MOST_WAITING,
    WINDOW_SECONDS,
    ThreadGovernor,
    waiting_seconds,
)

NUM_THREADS = 4
STEP_SECONDS = 0.02


class Machine:
    """Steps whose threads, when there are several, stand in line for `waiting_share` of the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = 0.0
        self.waiting_share = 0.0
        self.num_threads = NUM_THREADS
        self.changes: list[tuple[float, int]] = []
        self.governor = ThreadGovernor(NUM_THREADS, self._set, lambda: self.waited, lambda: self.now)

    def _set(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.changes.append((self.now, num_threads))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_SECONDS
            self.waited += self.waiting_share * STEP_SECONDS if self.num_threads > 1 else 0.0
            self.governor.after_step(STEP_SECONDS)


def test_an_idle_machine_keeps_all_threads() -> None:
    machine = Machine()
    machine.waiting_share = MOST_WAITING / 2
    machine.run(60)
    assert machine.changes == []


def test_contention_leaves_one_thread_within_two_windows() -> None:
    machine = Machine()
    machine.run(5)
    machine.waiting_share = 1.0
    machine.run(2 * WINDOW_SECONDS + 2 * STEP_SECONDS)
    assert machine.num_threads == 1


def test_lasting_contention_is_looked_at_ever_more_rarely() -> None:
    machine = Machine()
    machine.waiting_share = 1.0
    machine.run(300)
    seconds_with_all = sum(
        end - start
        for (start, count), (end, _) in zip(machine.changes, machine.changes[1:], strict=False)
        if count > 1
    )
    assert seconds_with_all < 0.02 * 300
    longest = max(
        end - start
        for (start, count), (end, _) in zip(machine.changes, machine.changes[1:], strict=False)
        if count == 1
    )
    assert longest <= LONGEST_HOLD_SECONDS + 2 * STEP_SECONDS


def test_all_threads_return_soon_after_a_short_disturbance() -> None:
    machine = Machine()
    machine.waiting_share = 1.0
    machine.run(3 * WINDOW_SECONDS)
    assert machine.num_threads == 1
    machine.waiting_share = 0.0
    machine.run(FIRST_HOLD_SECONDS + WINDOW_SECONDS)
    assert machine.num_threads == NUM_THREADS
    # And a quiet window makes the next hold a short one again.
    machine.run(2 * WINDOW_SECONDS)
    machine.waiting_share = 1.0
    machine.run(3 * WINDOW_SECONDS)
    machine.waiting_share = 0.0
    machine.run(FIRST_HOLD_SECONDS + WINDOW_SECONDS)
    assert machine.num_threads == NUM_THREADS


def test_waiting_is_added_up_over_threads_and_ended_ones_are_left_out(tmp_path: Path) -> None:
    for name, text in {"1": "5000 1500000000 7", "2": "1 500000000 2", "3": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text + "\n")
    (tmp_path / "4").mkdir()
    assert waiting_seconds(tmp_path) == 2.0
