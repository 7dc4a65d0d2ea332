"""One replica as the gateway sees it, and the words of a backend list. No I/O, no choosing."""

from dataclasses import dataclass
from typing import Literal

from headway_gateway.load import ReplicaLoad

# With so many it is busy while more come; where prompts are short they are soon twice as many.
FIRST_PROMPTS = 8
# ready: takes new requests. draining: finishes what it has. unready: known, but not serving (yet).
BackendState = Literal["ready", "draining", "unready"]


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One line of a list of backends, from whichever world. `url` has no path and no trailing slash."""

    id: str
    url: str
    state: BackendState


@dataclass(slots=True, eq=False)
class Backend(ReplicaLoad):
    """A replica's entry with what this gateway knows of it. Only `pool.py` writes it.

    A backend that refused a connection is suspect, until one stands again; how long it is left alone before
    that is tried is `rest_seconds`. num_failures: answers one after another that were errors of its own.
    room: how many of those who wait may be given to it, since it last refused one of them; None for any.
    most_prompts: of those who wait for a stream it is given no more while so many have not begun.
    """

    id: str
    url: str
    state: BackendState
    revision: str = ""
    is_suspect: bool = False
    rest_seconds: float = 0.0
    num_failures: int = 0
    room: int | None = None
    most_prompts: int = FIRST_PROMPTS
