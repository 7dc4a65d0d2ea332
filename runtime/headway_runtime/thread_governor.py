"""How many threads compute a step, as the machine's other work allows.

Threads of one step wait for each other a hundred times or more. On idle processors they are best at it while
spinning: waking a sleeping one takes longer than many an operator. But where other work wants the same
processors, each wait lasts until the scheduler gives the other thread its turn, and two threads become many
times slower than one. So the threads spin (the server's environment sees to that), and this counts how long
they stood in line for a processor: while that is much of the time, one thread computes alone.

Linux tells each thread's time in line; elsewhere nothing is limited. Knows nothing of models and torch.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

TASKS = Path("/proc/self/task")
# Steps are judged by so much of their time at once.
WINDOW_SECONDS = 0.25
# Time in line, of all threads together, over the time of the steps; above, one thread is the faster way.
MOST_WAITING = 0.35
# How long one thread then computes alone: twice as long each time in a row.
FIRST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0


def can_tell_waiting() -> bool:
    """Whether this system counts the time that threads stand in line for a processor."""
    return (TASKS / str(os.getpid()) / "schedstat").exists()


def waiting_seconds(tasks: Path = TASKS) -> float:
    """Time that the threads of this process, all together, have so far stood in line for a processor."""
    nanoseconds = 0
    for task in tasks.iterdir():
        try:
            nanoseconds += int((task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return nanoseconds / 1e9


class ThreadGovernor:
    """Told of each step's time; calls `set_num_threads` when the count changes."""

    def __init__(
        self,
        num_threads: int,
        set_num_threads: Callable[[int], None],
        read_waiting_seconds: Callable[[], float] = waiting_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_threads = num_threads
        self._set_num_threads = set_num_threads
        self._read_waiting_seconds = read_waiting_seconds
        self._clock = clock
        self._hold_seconds = FIRST_HOLD_SECONDS
        self._alone_until: float | None = None
        self._window_seconds = 0.0
        self._waiting_at_start: float | None = None

    def after_step(self, step_seconds: float) -> None:
        """Judge a step that has just been computed, and decide on the next one's threads."""
        if self._alone_until is not None:
            if self._clock() >= self._alone_until:
                self._alone_until = None
                self._set_num_threads(self._num_threads)
            return
        if self._waiting_at_start is None:
            self._begin_window(self._read_waiting_seconds())
            return
        self._window_seconds += step_seconds
        if self._window_seconds < WINDOW_SECONDS:
            return
        waiting = self._read_waiting_seconds()
        share = max(0.0, waiting - self._waiting_at_start) / self._window_seconds
        self._begin_window(waiting)
        if share <= MOST_WAITING:
            self._hold_seconds = FIRST_HOLD_SECONDS
            return
        self._set_num_threads(1)
        self._alone_until = self._clock() + self._hold_seconds
        self._hold_seconds = min(2 * self._hold_seconds, LONGEST_HOLD_SECONDS)
        self._waiting_at_start = None

    def _begin_window(self, waiting_seconds: float) -> None:
        self._waiting_at_start = waiting_seconds
        self._window_seconds = 0.0
