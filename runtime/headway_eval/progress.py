"""Says on standard error how far the evaluation is: a bar on a terminal, else a line now and then."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Step = Callable[[int], object]
SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Step]:
    """Gives what is called with the number of units done since the last call."""
    if sys.stderr.isatty():
        import tqdm

        with tqdm.tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True) as bar:
            yield bar.update
        return
    lines = _Lines(label, total, unit)
    lines.say()
    yield lines.step
    lines.say()


class _Lines:
    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._said_at = time.monotonic()

    def step(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._said_at >= SECONDS_BETWEEN_LINES:
            self.say()

    def say(self) -> None:
        self._said_at = time.monotonic()
        print(f"{self._label}: {self._done} of {self._total} {self._unit}", file=sys.stderr, flush=True)
