"""What the cluster shows of one ModelCache at one instant."""

from dataclasses import dataclass
from typing import Literal

from headway_operator.state import ChildKey

# waiting: no pod runs yet. retrying: an attempt has failed and the next is to come. done, failed: the Job has
# ended.
FetchPhase = Literal["waiting", "running", "retrying", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The PersistentVolumeClaim onto which is fetched. message: why it is not bound, where somebody says."""

    name: str
    uid: str
    phase: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One Job that fetches.

    reason, message: the cause while no pod of it runs. output: what its latest attempt left behind.
    bytes, total_bytes: how far it is, where that is known. ended_at: of a Job that has.
    """

    name: str
    phase: FetchPhase
    began_at: float
    reason: str = ""
    message: str = ""
    output: str = ""
    failed_attempts: int = 0
    bytes: int | None = None
    total_bytes: int | None = None
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedCache:
    """claim: None where there is none of that name. services: names of those that use the cache."""

    claim: Claim | None = None
    fetches: tuple[Fetch, ...] = ()
    children: frozenset[ChildKey] = frozenset()
    services: tuple[str, ...] = ()
