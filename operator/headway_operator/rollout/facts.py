"""What one pass sees of a rollout, and how far it lets it go."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway_operator.rollout.evidence import CanaryEvidence
from headway_operator.rollout.record import Failure, Record
from headway_operator.rollout.trouble import is_failing
from headway_operator.samples import Sample
from headway_operator.spec import Service
from headway_operator.state import Observed, Replica, RevisionPin
from headway_operator.times import timestamp

NO_RECORD = Record()


@dataclass(frozen=True, slots=True)
class Rollout:
    """What plan and conditions go by.

    is_paused: the candidate's replicas fail, or it cannot be made. refusal: why it cannot, or "". most:
    replicas that the candidate may have for now; None: all that are wanted. weights: shares of the requests
    by revision; empty: by load alone. waits_for: what a canary waits for, in words. evidence: for the next
    pass.
    """

    record: Record = NO_RECORD
    is_paused: bool = False
    refusal: str = ""
    most: int | None = None
    weights: Mapping[str, int] = field(default_factory=dict)
    waits_for: str = ""
    evidence: CanaryEvidence | None = None

    @property
    def stable(self) -> str:
        """Name of the revision to fall back on, or ""."""
        return "" if self.record.stable is None else self.record.stable.name

    @property
    def given_up(self) -> str:
        """Name of the revision whose place the stable one has taken again, or ""."""
        failed = self.record.failed
        return "" if failed is None or self.stable in ("", failed.name) else failed.name


@dataclass(frozen=True, slots=True)
class Facts:
    """What is asked and what is there; others: replicas of other revisions that have not begun to leave.

    refusal: why the candidate's object could not be made by the last pass, or "".
    """

    service: Service
    observed: Observed
    sample: Sample
    candidate: RevisionPin
    wanted: int
    now: float
    refusal: str = ""

    @property
    def mine(self) -> list[Replica]:
        return [one for one in self.observed.replicas if one.revision == self.candidate.hash]

    @property
    def num_ready(self) -> int:
        return sum(one.phase == "ready" for one in self.mine)

    @property
    def num_others(self) -> int:
        others = [one for one in self.observed.replicas if one.revision != self.candidate.hash]
        return sum(one.phase != "draining" for one in others)

    @property
    def is_unmade(self) -> bool:
        """Whether nothing of it is there, as whoever would have to make it refuses."""
        names = {revision.name for revision in self.observed.revisions}
        return bool(self.refusal) and self.candidate.name not in names

    @property
    def is_failing(self) -> bool:
        return any(is_failing(one) for one in self.mine)

    @property
    def serves_nobody(self) -> bool:
        return all(one.phase != "ready" for one in self.observed.replicas)

    @property
    def is_whole(self) -> bool:
        """All wanted replicas are ready, or those for which there is room once no others remain."""
        if not self.wanted or not self.num_ready:
            return False
        return self.num_ready >= self.wanted or not self.num_others

    @property
    def cause(self) -> str:
        """What keeps a replica of the candidate, in words."""
        if self.is_unmade:
            return f"it cannot be made: {self.refusal}"
        waiting = [one for one in self.mine if one.phase not in ("ready", "draining")]
        told = [one for one in waiting if one.message or one.reason] or waiting
        if not told:
            return "no replica of it exists" if not self.mine else "all its replicas are ready"
        one = told[0]
        return f"{one.name} is {one.phase}" + (f": {one.message or one.reason}" if one.reason else "")

    def given_up(self, reason: str, message: str) -> Failure:
        """The candidate as one that is not tried again."""
        candidate = self.candidate
        return Failure(candidate.name, candidate.spec_hash, reason, message, timestamp(self.now))
