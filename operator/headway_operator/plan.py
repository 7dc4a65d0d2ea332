"""From a decision to what must be done: replicas per revision, and the limits that replicas still lack.

The algorithm:

1. Wanted replicas are `spec.replicas` when set, else the decision's.
2. The current revision (the rendered one) is scaled to the wanted number. While it is withheld and nothing
   else serves, there is none to be scaled, and what is left of older ones stays.
3. An older revision keeps the replicas it has while the current one has fewer ready replicas than wanted, so
   that a rollout never lowers what serves. An older revision whose replicas are all pending or failed serves
   nobody; it is scaled to 0 at once, which frees what it occupies for the current one.
4. Once the current revision has the wanted number ready, older ones are scaled to 0; one that has no replicas
   left is no longer kept, so that it is pruned.
5. Where replicas of a revision are removed but not all, each gets a deletion cost: what runs and waits on it,
   so that the emptiest goes first.
6. A ready replica whose sample shows other targets or limits than it should have is patched; the limits are
   bounded by the envelope that the replica itself states (an older revision may have a smaller one).

Stateless: everything is read from what is observed. Knows nothing of how anything is applied.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headway_operator.spec import Service
from headway_operator.state import (
    ChildKey,
    Decision,
    Limits,
    Observed,
    Plan,
    Rendered,
    ReplicaSample,
    Sample,
)


def plan(
    service: Service, rendered: Rendered, observed: Observed, sample: Sample, decision: Decision
) -> Plan:
    """What the appliers must do to get from `observed` to what `rendered` and `decision` ask for."""
    wanted = wanted_replicas(service, decision)
    scale = {} if rendered.serves_nothing else _scale(rendered.revision.name, wanted, observed)
    return Plan(
        manifests=rendered.manifests,
        keep=rendered.keep | _kept_revisions(rendered.revision.name, observed),
        scale=scale,
        patch=_patch(service, sample, decision.limits),
        deletion_costs=_deletion_costs(observed, sample, scale),
    )


def wanted_replicas(service: Service, decision: Decision) -> int:
    """The number of replicas the current revision should have."""
    return decision.replicas if service.spec.replicas is None else service.spec.replicas


def _scale(current: str, wanted: int, observed: Observed) -> dict[str, int]:
    ready = Counter(replica.revision for replica in observed.replicas if replica.phase == "ready")
    alive = {replica.revision for replica in observed.replicas if replica.phase in ("ready", "starting")}
    existing = {revision.name: revision for revision in observed.revisions}
    scale = {}
    if current not in existing or existing[current].replicas != wanted:
        scale[current] = wanted
    is_replaced = current in existing and ready[existing[current].hash] >= wanted
    for name, revision in existing.items():
        if name != current and revision.replicas > 0 and (is_replaced or revision.hash not in alive):
            scale[name] = 0
    return scale


def _kept_revisions(current: str, observed: Observed) -> frozenset[ChildKey]:
    occupied = {replica.revision for replica in observed.replicas}
    return frozenset(
        ChildKey("Deployment", revision.name)
        for revision in observed.revisions
        if revision.name == current or revision.replicas > 0 or revision.hash in occupied
    )


def _patch(service: Service, sample: Sample, limits: Limits) -> dict[str, Mapping[str, Any]]:
    slo = service.spec.slo
    targets = {
        "ttft_milliseconds": _number(slo.ttft_milliseconds if slo else None),
        "tpot_milliseconds": _number(slo.tpot_milliseconds if slo else None),
    }
    bodies = {
        name: _lacking(replica, limits, targets)
        for name, replica in sample.replicas.items()
        if replica is not None and not replica.draining
    }
    return {name: body for name, body in bodies.items() if body}


def _number(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else float(milliseconds)


def _lacking(replica: ReplicaSample, limits: Limits, targets: Mapping[str, float | None]) -> dict[str, Any]:
    body: dict[str, Any] = {
        name: want for name, want in targets.items() if getattr(replica.targets, name) != want
    }
    seqs = min(limits.max_num_seqs, replica.envelope.max_num_seqs)
    tokens = max(seqs, min(limits.max_num_batched_tokens, replica.envelope.max_num_batched_tokens))
    # Both or none: a replica checks the pair, and one half alone could be refused.
    if replica.limits != Limits(seqs, tokens):
        body |= {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    return body


def _deletion_costs(observed: Observed, sample: Sample, scale: Mapping[str, int]) -> dict[str, int]:
    shrinking = {
        revision.hash
        for revision in observed.revisions
        if 0 < scale.get(revision.name, 0) < revision.replicas
    }
    costs = {
        replica.name: _load(sample.replicas.get(replica.name))
        for replica in observed.replicas
        if replica.revision in shrinking and replica.phase == "ready"
    }
    known = {replica.name: replica.deletion_cost for replica in observed.replicas}
    return {name: cost for name, cost in costs.items() if known[name] != cost}


def _load(replica: ReplicaSample | None) -> int:
    """Requests in hand; a ready replica that gives no sample is the one to lose least."""
    return -1 if replica is None else replica.running + replica.waiting
