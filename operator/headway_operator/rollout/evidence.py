"""What was counted of a candidate and of the stable revision beside it, since a step of a canary began.

Latencies come from the replicas, errors from the gateways, which know what became of a request whose replica
died. An operator that starts again gathers anew; how long a step has lasted stands in status. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from headway_operator.samples import GatewaySample, RevisionTotals, Sample, Targets
from headway_operator.slo.baselines import Baseline
from headway_operator.slo.slices import Slice, joined
from headway_operator.slo.window import advance
from headway_operator.state import Observed

NOTHING = RevisionTotals(0, 0)
NO_SLICE = Slice(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Side:
    """One revision: what its replicas counted, and what the gateways did."""

    counted: Slice = NO_SLICE
    answered: RevisionTotals = NOTHING
    baselines: Mapping[str, Baseline] = field(default_factory=dict)

    @property
    def emptied(self) -> "Side":
        """What is counted from here on."""
        return Side(baselines=self.baselines)


@dataclass(frozen=True, slots=True)
class CanaryEvidence:
    """Both sides since `since`, in the step that `step` names: (candidate, number of the step).

    gateways: instance of a gateway -> what it had counted by revision at the last pass.
    """

    step: tuple[str, int]
    since: float
    at: float
    candidate: Side = Side()
    stable: Side = Side()
    gateways: Mapping[str, Mapping[str, RevisionTotals]] = field(default_factory=dict)

    @property
    def repeated(self) -> "CanaryEvidence":
        """For the same step once more, from here on."""
        sides = self.candidate.emptied, self.stable.emptied
        return CanaryEvidence(self.step, self.at, self.at, *sides, self.gateways)


def gathered(
    before: CanaryEvidence | None,
    step: tuple[str, int],
    revisions: tuple[tuple[str, str], tuple[str, str]],
    sample: Sample,
    observed: Observed,
    targets: Targets,
    now: float,
) -> CanaryEvidence:
    """The evidence after one more pass; a new one, with nothing counted yet, where another step has begun.

    revisions: (name, hash) of the candidate and of the stable one.
    """
    if before is None or before.step != step:
        before = None
    at = now if before is None else before.at
    seen = {one.instance: one for one in sample.gateways.values() if one is not None}
    sides = []
    for (name, hash_), side in zip(
        revisions, (Side(), Side()) if before is None else (before.candidate, before.stable), strict=True
    ):
        part = _of_revision(hash_, sample, observed)
        # All that came since the step began is of it, however long ago anybody last looked.
        (new,), baselines, *_ = advance((), side.baselines, part, observed, targets, at, at, longest_gap=inf)
        added = [
            _grown(one, name, before.gateways.get(instance))
            for instance, one in seen.items()
            if before is not None
        ]
        answered = RevisionTotals(
            side.answered.requests + sum(one.requests for one in added),
            side.answered.errors + sum(one.errors for one in added),
            side.answered.client_aborted + sum(one.client_aborted for one in added),
        )
        # In the first pass everything only marks a beginning.
        counted = side.counted if before is None else joined((side.counted, new))
        sides.append(Side(counted, answered, baselines))
    gateways = {} if before is None else dict(before.gateways)
    gateways |= {instance: one.revisions for instance, one in seen.items()}
    since = now if before is None else before.since
    return CanaryEvidence(step, since, now, sides[0], sides[1], gateways)


def _of_revision(hash_: str, sample: Sample, observed: Observed) -> Sample:
    mine = {replica.name for replica in observed.replicas if replica.revision == hash_}
    return Sample(sample.taken_at, {name: one for name, one in sample.replicas.items() if name in mine})


def _grown(one: GatewaySample, revision: str, before: Mapping[str, RevisionTotals] | None) -> RevisionTotals:
    """What a gateway counted since the last pass; one that is new has counted all it shows since then."""
    now, then = one.revisions.get(revision, NOTHING), (before or {}).get(revision, NOTHING)
    if now.requests < then.requests:  # counted anew
        then = NOTHING
    return RevisionTotals(
        now.requests - then.requests,
        max(0, now.errors - then.errors),
        max(0, now.client_aborted - then.client_aborted),
    )
