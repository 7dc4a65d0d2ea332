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
# What each kind of source has besides a proxy, a folder and the cache.
_OTHER_ENDPOINTS = {
    "hf://": "HF_ENDPOINT names a mirror of the Hub, ",
    "s3://": "AWS_ENDPOINT_URL names another storage, ",
}
_MOST_LONGER = 1.25


def ways_out(what: str) -> str:
    """What one can do whose source does not answer; `what` begins with the source's address."""
    scheme = what[: what.find("://") + 3]
    return (
        f"ways out: HTTPS_PROXY names a proxy, {_OTHER_ENDPOINTS.get(scheme, '')}"
        f"a folder can take the place of {scheme}..., HEADWAY_OFFLINE=1 uses what is cached "
        "(docs/sources.md)"
    )


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
                f"go on; {ways_out(what)}"
            ) from error
        if asked is not None and asked > self.longest_asked_seconds:
            raise ModelFetchError(
                f"{what}: {error}; it asks to come again in {asked:.0f} s. What has come is kept: start "
                "again then"
            ) from error
        seconds = max(self._shortest_pause(failures) * random.uniform(1.0, _MOST_LONGER), asked or 0.0)
        pauses = seconds + sum(map(self._shortest_pause, range(failures + 1, self.num_tries))) * _MOST_LONGER
        logger.warning(
            "%s: %s; try %d of %d failed, the next in %.1f s, given up after %.0f s of pauses%s",
            *(what, error, failures, self.num_tries, seconds, pauses),
            f"; {ways_out(what)}" if failures == 1 else "",
        )
        self.sleep(seconds)

    def _shortest_pause(self, failures: int) -> float:
        return min(self.first_pause_seconds * 2.0 ** (failures - 1), self.longest_pause_seconds)

    def given_up(self, what: str) -> str:
        """The end of what is said where `ask` has failed for the last time."""
        return f"given up after {self.num_tries} tries. Look at the network and start again; {ways_out(what)}"

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
