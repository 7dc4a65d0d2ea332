"""One pass over one service: the list of steps, nothing else. Creation, edits, restarts, ticks all take it.

 1. read      the manifest becomes a Service. Where it cannot be honoured a condition says so, and the last
              spec that could be stays in force (`in_force`); without one that is all. Each cache that it
              names becomes the folder on its claim, unless nothing is there yet
 2. observe   what the cluster has
 3. scrape    what replicas and gateways measured
 4. render    the children there should be
 5. judge     whether what is new among them may be served yet, and what judges it
 6. decide    replicas and limits, with the memory of the last pass
 7. follow    how far a rollout may go, and what serves where it was given up
 8. plan      what must be done
 9. apply     each child; what others changed in a revision or gateway that is kept as it is, is undone
10. scale     each revision, the emptiest replica first
11. prune     children no longer wanted, unless an apply failed
12. patch     limits and targets of each replica, and what gateways go by
13. status    when it says something new, with its events
14. memory    at most once a minute, and when another spec was accepted; what says nothing new, less often

A step that fails changes nothing that serves: it is recorded, the other steps go on, and the next pass tries
it again. Only without an observation there is nothing to go on with. A spec over which the operator itself
fails in 1, 4 or 5 is told and left aside like one that cannot be honoured. Where it fails in 6, 7 or 8, that
is told and nothing is changed; in 13 it is told in place of what failed.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from headway_operator import conditions, in_force
from headway_operator.cluster.protocol import Cluster
from headway_operator.errors import HeadwayOperatorError, InternalError, SpecError, as_internal_error
from headway_operator.manifests import render
from headway_operator.model_cache import caches_used, with_caches
from headway_operator.names import REVISION_KINDS
from headway_operator.passes import DECIDE_STEP, READ_STEP, RENDER_STEP, STATUS_STEP, Carried, Outcome, World
from headway_operator.plan import plan, wanted_replicas
from headway_operator.quality import Gate, awaiting_model, gated, materials, open_or_shut, withheld
from headway_operator.rollout import Rollout, follow
from headway_operator.samples import Sample
from headway_operator.scrape import Scraper
from headway_operator.slo import Memory, decide, resume, target_of, with_end_to_end
from headway_operator.spec import Manifest, Service, key_of, parse
from headway_operator.state import ChildKey, Decision, Observed, Plan, Rendered, ServiceKey
from headway_operator.times import drawn_share

logger = logging.getLogger(__name__)

# Of a service; longer where all of them together would write more than that.
CHECKPOINT_SECONDS = 60.0
MOST_CHECKPOINTS_PER_SECOND = 4.0
# Of these times: after how many one that says nothing new is written all the same, and how many it counts for
# other operators, which leave the service alone until then.
RENEWAL_PERIODS, COUNTING_PERIODS = 2, 3


async def reconcile(world: World, manifest: Manifest, carried: Carried) -> Outcome:
    """Take one pass over the service as `manifest` now has it, its last status included.

    Raises ClusterError when the cluster cannot be observed or the checkpoint not be read, OtherOperatorError,
    before anything is done, where another operator looks after the service.
    """
    cluster, key = world.cluster, key_of(manifest)
    await cluster.check_alone(key)
    outcome = Outcome(key, manifest.get("status") or {}, earlier_problems=carried.problems)
    carried.problems = outcome.problems
    refusal: SpecError | None = None
    try:
        read = await _read(world, manifest, outcome)
        carried.accepted = in_force.accepted(manifest)
    except SpecError as error:
        outcome.refuse(error)
        refusal = error
        standing = await _read_in_force(world, manifest, carried, outcome)
        if standing is None:
            await _tell(world, outcome, conditions.refused(manifest, error, world.clock()), carried)
            return outcome
        read = standing
    service, lack, observed, sample, rendered, gate = read
    memory = carried.memory or await _resumed(world, key, carried, sample)
    try:
        decided = _decide(service, observed, sample, rendered, gate, memory, carried, outcome, world.clock())
    except InternalError as error:
        outcome.refuse(error, DECIDE_STEP)
        await _tell(world, outcome, conditions.faulted(manifest, error, world.clock()), carried)
        return outcome
    decision, rendered, rollout, todo = decided
    await _act(cluster, world.scraper, outcome, todo, observed)
    of_the_spec = (READ_STEP, RENDER_STEP)
    messages = tuple(f"{one.step}: {one.message}" for one in outcome.problems if one.step not in of_the_spec)
    problems = conditions.Problems(messages, outcome.problem_reason or HeadwayOperatorError.condition_reason)
    try:
        with as_internal_error():
            status = conditions.status(
                service, rendered, observed, sample, decision, world.clock(), problems, gate, rollout, lack
            )
    except InternalError as error:
        outcome.refuse(error, STATUS_STEP)
        status = conditions.faulted(manifest, error, world.clock())
    if refusal is not None:
        status = conditions.standing(status, manifest, refusal, world.clock())
    await _tell(world, outcome, status, carried)
    await _checkpoint(world, service, outcome, carried)
    return outcome


def _decide(
    service: Service,
    observed: Observed,
    sample: Sample,
    rendered: Rendered,
    gate: Gate | None,
    memory: Memory,
    carried: Carried,
    outcome: Outcome,
    now: float,
) -> tuple[Decision, Rendered, Rollout, Plan]:
    """Steps 6 to 8. Raises InternalError, with what is carried as far as it came."""
    with as_internal_error():
        target = target_of(service.spec, conditions.longest_start_seconds(service))
        decision, carried.memory = decide(target, memory, sample, observed, now)
        outcome.decision = decision = with_end_to_end(decision, target, carried.memory)
        wanted = wanted_replicas(service, decision)
        unmade = outcome.refusal_of(rendered.revision.name)
        rendered, rollout = follow(
            service, rendered, observed, sample, wanted, gate, carried.evidence, now, unmade
        )
        outcome.rollout, carried.evidence = rollout, rollout.evidence
        return decision, rendered, rollout, plan(service, rendered, observed, sample, decision, rollout)


# A service, why it cannot be started, what there is of it, what that measured, its children, its judgement.
Read = tuple[Service, conditions.Lack | None, Observed, Sample, Rendered, Gate | None]


async def _read(world: World, manifest: Manifest, outcome: Outcome) -> Read:
    """Steps 1 to 5, by the spec of this manifest. Raises SpecError where that cannot be honoured."""
    cluster, key = world.cluster, outcome.key
    await world.pace(key)
    with as_internal_error():
        parsed = parse(manifest)
    service, lack = await _with_caches(cluster, parsed)
    outcome.observed = observed = outcome.observed or await cluster.observe(key)
    outcome.sample = sample = outcome.sample or await world.scraper.sample(key, observed)
    await world.pace(key)
    with as_internal_error():
        rendered = render(service, cluster.site, world.keys.public_pem, observed.children)
    gate = await _judge(world, service, rendered, observed) if lack is None else None
    with as_internal_error():
        if lack is None:
            rendered = gated(service, cluster.site, rendered, gate, observed.children)
        else:
            gate = awaiting_model(service, lack.message)
            rendered = withheld(service, rendered, observed.children)
    outcome.gate = gate
    return service, lack, observed, sample, rendered, gate


async def _read_in_force(world: World, manifest: Manifest, carried: Carried, outcome: Outcome) -> Read | None:
    """By the last accepted spec; None where there is none, or where the operator refuses it by now, too."""
    if carried.accepted is None:
        carried.accepted = in_force.read((await _saved(world, outcome.key, carried)).get("accepted"))
    last = in_force.instead_of(manifest, carried.accepted)
    try:
        return None if last is None else await _read(world, last, outcome)
    except SpecError as error:
        if isinstance(error, InternalError):
            outcome.refuse(error)
        return None


async def _with_caches(cluster: Cluster, service: Service) -> tuple[Service, conditions.Lack | None]:
    """The service with folders in place of the caches that it names, or with what it lacks."""
    names = caches_used(service.spec)
    if not names:
        return service, None
    return with_caches(service, await cluster.model_caches(service.key.namespace, names))


async def _judge(world: World, service: Service, rendered: Rendered, observed: Observed) -> Gate | None:
    files = materials(service)
    digests = await world.cluster.digests(service.key, files) if files else {}
    return open_or_shut(service, rendered.revision.runtime_image, observed, digests, world.clock())


async def _act(cluster: Cluster, scraper: Scraper, outcome: Outcome, todo: Plan, observed: Observed) -> None:
    key = outcome.key
    applied = [
        await outcome.attempt(f"apply {_child(manifest)}", cluster.apply(key, manifest))
        for manifest in todo.manifests
    ]
    for child in _left_as_they_are(todo, observed):
        step = f"repair {child.kind} {child.name}"
        applied.append(await outcome.attempt(step, cluster.repair(key, child)))
    for replica, cost in todo.deletion_costs.items():
        await outcome.attempt(
            f"set deletion cost of {replica}", cluster.set_deletion_cost(key, replica, cost)
        )
    for revision, replicas in todo.scale.items():
        await outcome.attempt(f"scale {revision} to {replicas}", cluster.scale(key, revision, replicas))
    if all(applied):
        for child in sorted(observed.children - todo.keep):
            await outcome.attempt(f"prune {child.kind} {child.name}", cluster.prune(key, child))
    addresses = {replica.name: replica.address for replica in observed.replicas}
    # All at once: one that does not answer holds up no other.
    await asyncio.gather(
        *(
            outcome.attempt(f"patch limits of {replica}", scraper.patch_limits(key, address, body))
            for replica, body in todo.patch.items()
            if (address := addresses.get(replica))
        )
    )
    for address, routing in todo.route.items():
        await outcome.attempt(f"route at {address}", scraper.route(key, address, routing))


async def _tell(world: World, outcome: Outcome, status: Mapping[str, Any], carried: Carried) -> None:
    """Write the status when it says something new, and once when an operator starts; then its events."""
    status = world.cluster.declared(status)
    previous, outcome.status = outcome.status, status
    if carried.has_told and not conditions.worth_writing(
        outcome.key, previous, status, world.clock(), world.num_services()
    ):
        return
    if not await outcome.attempt("write status", world.cluster.write_status(outcome.key, status)):
        return
    carried.has_told = True
    for kind, reason, message in conditions.events(previous, status):
        logger.info("%s: %s: %s", outcome.key, reason, message)
        await outcome.attempt("record event", world.cluster.emit(outcome.key, kind, reason, message))


async def _saved(world: World, key: ServiceKey, carried: Carried) -> Mapping[str, Any]:
    """The checkpoint, read once; empty where there is none."""
    if carried.saved is None:
        carried.saved = await world.cluster.load_memory(key) or {}
    return carried.saved


async def _resumed(world: World, key: ServiceKey, carried: Carried, sample: Sample) -> Memory:
    data, now = await _saved(world, key, carried) or None, world.clock()
    carried.saved = None
    try:
        return resume(data, sample, now)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("%s: the checkpoint cannot be read (%r); the controller starts without it", key, error)
        return resume(None, sample, now)


async def _checkpoint(world: World, service: Service, outcome: Outcome, carried: Carried) -> None:
    now, spec = world.clock(), carried.accepted
    seconds = world.num_services() / MOST_CHECKPOINTS_PER_SECOND
    period = max(CHECKPOINT_SECONDS, seconds, world.interval_seconds)
    age = now - carried.checkpointed_at
    wait = period * (1.0 + drawn_share(outcome.key, carried.checkpointed_at) / 2)
    is_due = age >= wait or spec != carried.checkpointed
    if carried.memory is None or not is_due:
        return
    data = carried.memory.to_dict() | ({} if spec is None else {"accepted": spec.to_dict()})
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    if digest == carried.checkpoint and age < RENEWAL_PERIODS * period:
        return
    save = world.cluster.save_memory(service.key, data, now + COUNTING_PERIODS * period)
    if await outcome.attempt("save memory", save):
        carried.checkpoint, carried.checkpointed_at, carried.checkpointed = digest, now, spec


def _left_as_they_are(todo: Plan, observed: Observed) -> list[ChildKey]:
    """Revisions and gateways that are kept, and not applied."""
    kinds = REVISION_KINDS
    applied = {one["metadata"]["name"] for one in todo.manifests if one["kind"] in kinds}
    kept = (child for child in todo.keep if child.kind in kinds and child.name not in applied)
    return sorted(child for child in kept if child in observed.children)


def _child(manifest: Manifest) -> str:
    child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
    return f"{child.kind} {child.name}"
