"""How long one goes on asking a source that does not answer as it should: a few tries, growing pauses."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headway_runtime.errors import ModelFetchError
from headway_runtime.sources.remote import TransientError

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Patience:
    """Tries in a row that may fail. Pauses double from the first to the longest, each up to a quarter longer.

    longest_asked_seconds: the longest pause that a source may ask for (Retry-After).
    """

    num_tries: int = 8
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0
    longest_asked_seconds: float = 300.0
    sleep: Callable[[float], None] = time.sleep

    def pause(self, failures: int, error: TransientError, what: str) -> None:
        """Wait before the next try. ModelFetchError when there is none; `failures`: how many there were."""
        asked = error.retry_after_seconds
        if failures >= self.num_tries:
            raise ModelFetchError(
                f"{what}: {error}; given up after {failures} tries. What has come is kept: start again to "
                "go on"
            ) from error
        if asked is not None and asked > self.longest_asked_seconds:
            raise ModelFetchError(
                f"{what}: {error}; it asks to come again in {asked:.0f} s. What has come is kept: start "
                "again then"
            ) from error
        seconds = min(self.first_pause_seconds * 2 ** (failures - 1), self.longest_pause_seconds)
        seconds = max(seconds * random.uniform(1.0, 1.25), asked or 0.0)
        logger.warning("%s: %s; trying again in %.1f s", what, error, seconds)
        self.sleep(seconds)

    def ask(self, question: Callable[[], Answer], what: str) -> Answer:
        """What `question` returns, as soon as it does not fail. The last TransientError passes through."""
        failures = 0
        while True:
            try:
                return question()
            except TransientError as error:
                failures += 1
                if failures >= self.num_tries:
                    raise
                self.pause(failures, error, what)
