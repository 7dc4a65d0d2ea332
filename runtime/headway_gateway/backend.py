"""One replica as the gateway sees it, and the words of a backend list. No I/O, no choosing."""

from dataclasses import dataclass
from typing import Literal

# ready: takes new requests. draining: finishes what it has. unready: known, but not serving (yet).
BackendState = Literal["ready", "draining", "unready"]

# A stream of which nothing has come counts as so many more requests: it holds up a new one as much as these.
UNANSWERED_WEIGHT = 8.0


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
    streamed and of which nothing has come. max_num_seqs: how many it computes at once, by its latest answer;
    None before the first.
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
    def num_met(self) -> float:
        """Requests that a new one meets there: it overtakes the late."""
        return max(0.0, self.in_flight - self.num_late)

    @property
    def is_full(self) -> bool:
        """Whether a new one waits until one of them has ended."""
        return self.max_num_seqs is not None and self.num_met >= self.max_num_seqs

    @property
    def load(self) -> float:
        """What a new one waits for: a place, or else the prompts that are not computed yet."""
        if self.is_full:
            return self.num_met
        return self.num_met + UNANSWERED_WEIGHT * max(0.0, self.num_unanswered - self.num_late)
