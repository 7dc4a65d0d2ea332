"""One replica as the gateway sees it, and the words of a backend list. No I/O, no choosing."""

from dataclasses import dataclass
from typing import Literal

# ready: takes new requests. draining: finishes what it has. unready: known, but not serving (yet).
BackendState = Literal["ready", "draining", "unready"]

# What a new request waits for, in requests that decode beside it. A prompt that is computed before its own,
# which a stream of which nothing has come stands for, holds it up as much as so many:
UNANSWERED_WEIGHT = 8.0
# A place that must be left first, as much as three such prompts: for each that is computed a place is left,
# and prompts take a third of a replica's time, say, where its places are what is short.
PLACE_WEIGHT = 24.0


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One line of a list of backends, from whichever world. `url` has no path and no trailing slash."""

    id: str
    url: str
    state: BackendState


@dataclass(slots=True, eq=False)
class Backend:
    """A replica's entry with what this gateway knows of it. Only `pool.py` writes it.

    A backend that refused a connection is suspect. It rests for `rest_seconds`, then one request may probe
    it; it rests twice as long if that fails too. One that answered 503 is avoided until `busy_until` where
    there is another choice.

    num_late: of those in flight, by its latest answer, requests that wait too late to be answered in time; 0
    where these are not most. num_unanswered: of those in flight, requests whose answer is to be
    streamed and of which nothing has come. max_num_seqs: how many it computes at once, by its latest answer,
    before which it is taken to be like the others; None before any answer.
    """

    id: str
    url: str
    state: BackendState
    revision: str = ""
    in_flight: int = 0
    num_late: float = 0.0
    num_unanswered: int = 0
    max_num_seqs: int | None = None
    last_picked: int = 0
    busy_until: float = 0.0
    is_suspect: bool = False
    is_resting: bool = False
    is_probed: bool = False
    rest_seconds: float = 0.0

    @property
    def load(self) -> float:
        """What a new request waits for there: it overtakes the late, but not prompts that are to be computed,
        nor those who wait for a place."""
        met = max(0.0, self.in_flight - self.num_late)
        ahead = UNANSWERED_WEIGHT * max(0.0, self.num_unanswered - self.num_late)
        if self.max_num_seqs is None:
            return met + ahead
        return met + ahead + PLACE_WEIGHT * max(0.0, met + 1 - self.max_num_seqs)
