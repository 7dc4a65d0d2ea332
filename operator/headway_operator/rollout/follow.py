"""How far a rollout may go, whether it has come to its end, and when it is given up.

The algorithm:

1. The stable revision is the one that had all its wanted replicas ready last (any of them, where no others
   remain). While what is rendered is another one, that one is the candidate.
2. A candidate whose replicas fail, or whose own object is refused, is paused: it gets no more of them, and
   nothing is taken from what serves.
3. A candidate that makes no progress (more of its replicas ready, fewer others) for the deadline is given up;
   at once, where it fails and nothing else serves. The stable revision takes its place again, and the spec
   that asked for it is not tried again until it changes.
4. With a canary, the candidate takes small shares of the requests first (`steps`), and is given up if it does
   badly. After the last step shares end, and the rest goes as without a canary.

Everything remembered is in the `Record`, which status keeps; the evidence of a step alone is in memory. How
replicas are moved is `plan`'s business.
"""

from dataclasses import replace

import msgspec

from headway_operator import names
from headway_operator.manifests.model_source import has_to_be_fetched
from headway_operator.manifests.render import hash_spec, pin_of
from headway_operator.manifests.runtime_template import startup_seconds
from headway_operator.quality import Gate
from headway_operator.rollout.evidence import CanaryEvidence
from headway_operator.rollout.facts import Facts, Rollout
from headway_operator.rollout.record import Failure, Pin, Record, recorded
from headway_operator.rollout.steps import WHOLE_WEIGHT, with_canary
from headway_operator.samples import Sample
from headway_operator.spec import Service
from headway_operator.state import ChildKey, Observed, Rendered
from headway_operator.times import seconds, timestamp

# Of reasons that say that the candidate served badly; others say that it does not come up.
CANARY_PREFIX = "Canary"


def follow(
    service: Service,
    rendered: Rendered,
    observed: Observed,
    sample: Sample,
    wanted: int,
    gate: Gate | None,
    evidence: CanaryEvidence | None,
    now: float,
    refusal: str = "",
) -> tuple[Rendered, Rollout]:
    """The children as the rollout has them, and how far it may go.

    wanted: replicas. evidence: of the last pass. refusal: why that could not make what is rendered, or "".
    Where a revision was given up, the stable one is rendered in its place.
    """
    facts = Facts(service, observed, sample, rendered.revision, wanted, now, refusal)
    record = _standing(service, rendered, facts)
    if _was_given_up(record, rendered):
        return _back(service, rendered, observed, record), _given_up(record, facts)
    if not record.candidate:
        return rendered, Rollout(record)
    refusal = facts.refusal if facts.is_unmade else ""
    rollout = Rollout(record, is_paused=facts.is_failing or facts.is_unmade, refusal=refusal)
    if service.spec.rollout.canary is not None and wanted and record.stable is not None:
        rollout = with_canary(rollout, service.spec.rollout.canary, record.stable, facts, gate, evidence)
    failure = _failure(rollout, facts)
    if failure is not None:
        record = Record(stable=record.stable, failed=failure)
        return _back(service, rendered, observed, record), _given_up(record, facts)
    return rendered, rollout


def _standing(service: Service, rendered: Rendered, facts: Facts) -> Record:
    """What status had, brought up to date: the stable revision, the candidate, its progress."""
    told, current = recorded(service.status), rendered.revision
    existing = {revision.name for revision in facts.observed.revisions}
    stable = _stable(told, service, facts)
    if stable is not None and stable.name not in existing:
        stable = None
    failed = None if told is None else told.failed
    if failed is not None and failed.spec_hash != hash_spec(service.spec):
        failed = None
    settled = Record(stable=stable, failed=failed)
    if rendered.serves_nothing or _was_given_up(settled, rendered):
        return settled
    is_follower = stable is not None and stable.name != current.name
    passed = told.step if told is not None and told.candidate == current.name else 0
    canary = service.spec.rollout.canary
    has_steps_left = is_follower and canary is not None and passed < len(canary.steps)
    if facts.is_whole and not has_steps_left:
        is_mended = failed is not None and failed.spec_hash == current.spec_hash
        return Record(stable=Pin.of(current), failed=None if is_mended else failed)
    if not is_follower:
        # An edit may have changed the spec and not the template: the pin as it is now.
        return settled if stable is None else msgspec.structs.replace(settled, stable=Pin.of(current))
    started = Record(
        stable=stable,
        candidate=current.name,
        started_at=timestamp(facts.now),
        older_replicas=facts.num_others,
    )
    if told is not None and told.candidate == current.name:
        started = msgspec.structs.replace(told, stable=stable, failed=None)
    return _with_progress(started, facts)


def _stable(told: Record | None, service: Service, facts: Facts) -> Pin | None:
    if told is not None:
        return told.stable
    # Before anybody kept a record: what status calls current, if it serves.
    pin = pin_of(service.status)
    if pin is None or not any(r.revision == pin.hash and r.phase == "ready" for r in facts.observed.replicas):
        return None
    return Pin.of(pin)


def _with_progress(record: Record, facts: Facts) -> Record:
    if not facts.wanted:
        return msgspec.structs.replace(record, progressed_at="")
    ready = max(record.ready_replicas, facts.num_ready)
    older = min(record.older_replicas, facts.num_others)
    moved = ready > record.ready_replicas or older < record.older_replicas or not record.progressed_at
    at = timestamp(facts.now) if moved else record.progressed_at
    return msgspec.structs.replace(record, ready_replicas=ready, older_replicas=older, progressed_at=at)


def _was_given_up(record: Record, rendered: Rendered) -> bool:
    failed = record.failed
    return (
        failed is not None and record.stable is not None and failed.spec_hash == rendered.revision.spec_hash
    )


def _back(service: Service, rendered: Rendered, observed: Observed, record: Record) -> Rendered:
    """The stable revision in place of what is rendered; the gateway, which came with that, stays."""
    assert record.stable is not None, "without a stable revision nothing is given up"
    stable = record.stable.pin()
    left_out = set(names.revision_children(rendered.revision.name))
    gateway = ChildKey("Deployment", names.gateway(service.name))
    if gateway in observed.children:
        left_out.add(gateway)
    return replace(
        rendered,
        revision=stable,
        manifests=tuple(
            manifest
            for manifest in rendered.manifests
            if ChildKey(manifest["kind"], manifest["metadata"]["name"]) not in left_out
        ),
        keep=(rendered.keep - left_out) | names.revision_children(stable.name) | {gateway},
    )


def _given_up(record: Record, facts: Facts) -> Rollout:
    """While replicas of what did badly in a canary remain, they get no request that another one can take."""
    stable, failed = record.stable, record.failed
    assert stable is not None, "without a stable revision nothing is given up"
    assert failed is not None, "called of what was given up"
    did_badly = failed.reason.startswith(CANARY_PREFIX)
    remains = did_badly and any(one.revision != stable.hash for one in facts.observed.replicas)
    return Rollout(record, weights={stable.name: WHOLE_WEIGHT} if remains else {})


def _failure(rollout: Rollout, facts: Facts) -> Failure | None:
    record = rollout.record
    if record.failed is not None:
        return record.failed
    if record.stable is None or not facts.wanted or not record.progressed_at:
        return None
    if facts.is_failing and facts.serves_nobody:
        words = f"it does not come up and nothing else serves: {facts.cause}"
        return facts.given_up("CandidateFailed", words)
    canary, since = facts.service.spec.rollout.canary, seconds(record.progressed_at)
    if canary is not None and record.step_started_at:
        since = max(since, seconds(record.step_started_at) + canary.hold_seconds)
    deadline = deadline_seconds(facts.service)
    if facts.now - since <= deadline:
        return None
    why = rollout.waits_for or facts.cause
    return facts.given_up("ProgressDeadlineExceeded", f"no progress for {deadline} s: {why}")


def deadline_seconds(service: Service) -> int:
    """How long a rollout may make no progress."""
    told = service.spec.rollout.progress_deadline_seconds
    return startup_seconds(is_fetching=has_to_be_fetched(service.spec)) if told is None else told
