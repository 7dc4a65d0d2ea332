"""From a decision to what must be done: replicas per revision, limits, and what gateways still lack.

The algorithm:

1. Wanted replicas are none while suspended, else `spec.replicas` when set, else the decision's.
2. The current revision (the rendered one) is scaled to the wanted number; in a canary, to as many as its
   share needs. While it is withheld and nothing else serves, there is none to be scaled, and what is left of
   older ones stays.
3. An older revision keeps the replicas it has while the current one has fewer ready replicas than wanted, so
   that a rollout never lowers what serves. An older revision of whose replicas none is ready or may soon be
   serves nobody; it is scaled to 0 at once, which frees what it occupies for the current one.
   Where `rollout.maxSurge` does not let all new replicas stand beside the old ones, the current revision gets
   as many as it lets, and older ones go as far as the wanted number goes on serving; with a surge of 0, that
   number less `rollout.maxUnavailable`. A canary has what its share needs, whatever the surge.
4. Where the scheduler or a quota says that there is no room for a replica of the current revision, one older
   replica goes: one that is not ready, or a ready one while at least wanted - `rollout.maxUnavailable` go on
   serving. The next one goes when that one has gone and is made up for: one out, one in.
5. While the current revision fails, none of this happens: it gets no more replicas, and the stable revision
   is scaled up to what is wanted beside it.
6. Once the current revision has the wanted number ready, older ones are scaled to 0; one that has no replicas
   left is no longer kept, so that it is pruned, unless it is the stable one that is still to be replaced.
7. Where replicas of a revision are removed but not all, each gets a deletion cost: what runs and waits on it,
   so that the emptiest goes first.
8. A ready replica whose sample shows other targets or limits than it should have is patched; the limits are
   bounded by the envelope that the replica itself states (an older revision may have a smaller one). So is a
   gateway that goes by another routing.
9. The gateway has `gateway.replicas` pods, once its Deployment is there.

Stateless: everything is read from what is observed and from the rollout's record. Knows nothing of how
anything is applied.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headway_operator import names
from headway_operator.rollout import Rollout
from headway_operator.rollout.trouble import lacks_room
from headway_operator.samples import Limits, ReplicaSample, Routing, Sample
from headway_operator.spec import Service
from headway_operator.spec.waiting import TIMEOUT_SECONDS, WAKING_TIMEOUT_SECONDS
from headway_operator.state import ChildKey, Decision, Observed, Plan, Rendered, Replica, Revision

# A replica without room may get some by itself in its first moments: another pod is just leaving.
ROOM_PATIENCE_SECONDS = 10.0
# A gateway is told of no more, the newest; there are two or three in practice.
MOST_REVISIONS = 16


def plan(
    service: Service,
    rendered: Rendered,
    observed: Observed,
    sample: Sample,
    decision: Decision,
    rollout: Rollout | None = None,
) -> Plan:
    """What the appliers must do to get from `observed` to what `rendered` and `decision` ask for."""
    rollout = Rollout() if rollout is None else rollout
    wanted = wanted_replicas(service, decision)
    scale: dict[str, int] = {}
    if not rendered.serves_nothing:
        scale = _scale(service, rendered.revision.name, wanted, observed, rollout, decision.at)
    return Plan(
        manifests=rendered.manifests,
        keep=rendered.keep | _kept_revisions(rendered.revision.name, observed, rollout),
        scale=scale | _gateways(service, observed),
        patch=_patch(service, sample, decision.limits),
        deletion_costs=_deletion_costs(observed, sample, scale),
        route=_route(service, rendered, observed, sample, rollout),
    )


def wanted_replicas(service: Service, decision: Decision) -> int:
    """The number of replicas the current revision should have."""
    if service.spec.suspend:
        return 0
    return decision.replicas if service.spec.replicas is None else service.spec.replicas


def _scale(
    service: Service, current: str, wanted: int, observed: Observed, rollout: Rollout, now: float
) -> dict[str, int]:
    ready = Counter(replica.revision for replica in observed.replicas if replica.phase == "ready")
    existing = {revision.name: revision for revision in observed.revisions}
    has = existing[current].replicas if current in existing else 0
    own = wanted if rollout.most is None else min(wanted, rollout.most)
    if rollout.is_paused:
        own = min(own, has)
    others = sum(revision.replicas for name, revision in existing.items() if name != current)
    surge = service.spec.rollout.surge(wanted)
    beside = own if rollout.most is not None else min(own, max(has, wanted + surge - others))
    is_held, own = beside < own, beside
    scale = {}
    if current not in existing or has != own:
        scale[current] = own
    is_replaced = current in existing and rollout.most is None and ready[existing[current].hash] >= wanted
    older = {name: revision for name, revision in existing.items() if name != current and revision.replicas}
    for name, revision in older.items():
        if rollout.is_paused and name == rollout.stable and not is_replaced:
            continue  # its new replicas may not even be scheduled yet
        if is_replaced or not _may_serve(revision, observed, is_given_up=name == rollout.given_up):
            scale[name] = 0
    staying = [revision for name, revision in older.items() if name not in scale]
    if rollout.is_paused:
        return scale | _made_up(staying, existing, current, ready, wanted, rollout)
    allowed = max(0, wanted - service.spec.rollout.max_unavailable)
    if is_held and (made := _made_way(staying, observed, rollout, wanted if surge else allowed)):
        return scale | made
    return scale | _one_out(staying, existing.get(current), observed, rollout, allowed, now)


def _may_serve(revision: Revision, observed: Observed, *, is_given_up: bool) -> bool:
    """Whether a replica is ready, or on its way to be; one that was given up gets no other chance."""
    phases = {replica.phase for replica in observed.replicas if replica.revision == revision.hash}
    return "ready" in phases or ("starting" in phases and not is_given_up)


def _made_up(
    staying: list[Revision],
    existing: Mapping[str, Revision],
    current: str,
    ready: Mapping[str, int],
    wanted: int,
    rollout: Rollout,
) -> dict[str, int]:
    """The stable revision has what is wanted beside a current one that fails."""
    stable = existing.get(rollout.stable)
    if stable is None or stable.name == current:
        return {}
    others = sum(revision.replicas for revision in staying if revision.name != stable.name)
    lacking = wanted - others - (ready[existing[current].hash] if current in existing else 0)
    return {stable.name: lacking} if stable.replicas < lacking else {}


def _made_way(staying: list[Revision], observed: Observed, rollout: Rollout, allowed: int) -> dict[str, int]:
    """Fewer of older revisions, the stable one last, while at least `allowed` replicas go on serving."""
    serving = Counter(replica.revision for replica in observed.replicas if replica.phase == "ready")
    spare = max(0, sum(serving.values()) - allowed)
    scale = {}
    for revision in sorted(staying, key=lambda one: (one.name == rollout.stable, one.created_at)):
        leaving = min(serving[revision.hash], spare)
        spare -= leaving
        # Those that are not ready serve nobody.
        if (left := min(revision.replicas, serving[revision.hash] - leaving)) < revision.replicas:
            scale[revision.name] = left
    return scale


def _one_out(
    staying: list[Revision],
    current: Revision | None,
    observed: Observed,
    rollout: Rollout,
    allowed: int,
    now: float,
) -> dict[str, int]:
    """One replica less of an older revision where there is no room. allowed: the fewest that may serve."""
    if current is None or not staying or not any(_has_no_room(r, current, now) for r in observed.replicas):
        return {}
    hashes = {revision.hash for revision in staying}
    if any(replica.revision in hashes and replica.phase == "draining" for replica in observed.replicas):
        return {}  # what it leaves is the room that is waited for
    num_serving = sum(replica.phase == "ready" for replica in observed.replicas)
    for revision in sorted(staying, key=lambda one: (one.name == rollout.stable, one.created_at)):
        num_ready = sum(r.revision == revision.hash and r.phase == "ready" for r in observed.replicas)
        if num_ready < revision.replicas or num_serving - 1 >= allowed:
            return {revision.name: revision.replicas - 1}
    return {}


def _has_no_room(replica: Replica, current: Revision, now: float) -> bool:
    is_old_enough = replica.created_at + ROOM_PATIENCE_SECONDS <= now
    return replica.revision == current.hash and lacks_room(replica) and is_old_enough


def _kept_revisions(current: str, observed: Observed, rollout: Rollout) -> frozenset[ChildKey]:
    occupied = {replica.revision for replica in observed.replicas}
    awaited = (current, rollout.stable if rollout.record.candidate else "")
    return frozenset(
        ChildKey(revision.kind, revision.name)
        for revision in observed.revisions
        if revision.name in awaited or revision.replicas > 0 or revision.hash in occupied
    )


def _patch(service: Service, sample: Sample, limits: Limits) -> dict[str, Mapping[str, Any]]:
    slo = service.spec.slo
    targets = {
        "ttft_milliseconds": _number(slo.ttft_milliseconds if slo else None),
        "tpot_milliseconds": _number(slo.tpot_milliseconds if slo else None),
        "e2e_milliseconds": _number(slo.end_to_end_milliseconds if slo else None),
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
        name: want
        for name, want in targets.items()
        if getattr(replica.targets, name) != want
        and (replica.judges_end_to_end or name != "e2e_milliseconds")
    }
    seqs = min(limits.max_num_seqs, replica.envelope.max_num_seqs)
    tokens = max(seqs, min(limits.max_num_batched_tokens, replica.envelope.max_num_batched_tokens))
    # Both or none: a replica checks the pair, and one half alone could be refused.
    if replica.limits != Limits(seqs, tokens):
        body |= {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    return body


def _route(
    service: Service, rendered: Rendered, observed: Observed, sample: Sample, rollout: Rollout
) -> dict[str, Routing]:
    newest_first = sorted(observed.revisions, key=lambda one: one.created_at, reverse=True)
    named = dict.fromkeys(
        [rendered.revision.name, *rollout.weights, *(revision.name for revision in newest_first)]
    )
    spec = service.spec
    may_sleep = spec.replicas is None and spec.scaling.min_replicas == 0
    otherwise = WAKING_TIMEOUT_SECONDS if may_sleep else TIMEOUT_SECONDS
    timeout = spec.waiting.timeout_seconds
    routing = Routing(
        max_waiting=spec.waiting.max_requests,
        waiting_timeout_seconds=otherwise if timeout is None else float(timeout),
        revisions=tuple(sorted([*named][:MOST_REVISIONS])),
        weights=rollout.weights,
        is_suspended=spec.suspend,
    )
    return {
        address: routing
        for address, gateway in sample.gateways.items()
        if gateway is not None and gateway.routing is not None and gateway.routing != routing
    }


def _gateways(service: Service, observed: Observed) -> dict[str, int]:
    has, wanted = observed.gateway.replicas, service.spec.gateway.replicas
    return {} if has in (None, wanted) else {names.gateway(service.name): wanted}


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
