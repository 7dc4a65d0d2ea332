"""Signals while a model is fetched: they end it at once, with words in place of a traceback.

SIGTERM has to be handled here: a process that is the first of its container is not ended by it else. Knows
nothing of what is fetched.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptedBySignal(BaseException):
    """The user, or who runs this process, wants it to end."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"{name} while the model was fetched; what has come is kept: start again to go on")
        # As a shell says it of a process that a signal has ended.
        self.exit_status = 128 + number


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """SIGTERM and SIGINT raise InterruptedBySignal in the main thread; as before in the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
