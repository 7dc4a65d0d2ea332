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
 9. apply     each child
10. scale     each revision, the emptiest replica first
11. prune     children no longer wanted, unless an apply failed
12. patch     limits and targets of each replica, and what gateways go by
13. status    when it says something new, with its events
14. memory    at most once a minute, and when another spec was accepted

A step that fails changes nothing that serves: it is recorded, the other steps go on, and the next pass tries
it again. Only without an observation there is nothing to go on with. A spec over which the operator itself
fails in 1, 4 or 5 is told and left aside like one that cannot be honoured.
"""

import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway_operator import conditions, in_force, names
from headway_operator.cluster.protocol import Cluster
from headway_operator.errors import (
    HeadwayOperatorError,
    InternalError,
    NotLeadingError,
    SpecError,
    as_internal_error,
)
from headway_operator.in_force import Accepted
from headway_operator.keys import Signer
from headway_operator.manifests import render
from headway_operator.model_cache import caches_used, with_caches
from headway_operator.plan import plan, wanted_replicas
from headway_operator.quality import Gate, awaiting_model, gated, materials, open_or_shut, withheld
from headway_operator.rollout import CanaryEvidence, Rollout, follow
from headway_operator.scrape import Scraper
from headway_operator.slo import Memory, decide, resume, target_of, with_end_to_end
from headway_operator.spec import Manifest, Service, key_of, parse
from headway_operator.state import ChildKey, Decision, Observed, Plan, Rendered, Sample, ServiceKey

logger = logging.getLogger(__name__)

# Of a service; longer where all of them together would write more than that.
CHECKPOINT_SECONDS = 60.0
MOST_CHECKPOINTS_PER_SECOND = 4.0
READ_STEP = "read"  # which fails where a spec cannot be honoured
RENDER_STEP = "render"  # where the operator fails over one
SLEEPING_CAUSES = ("Idle", "Asleep")


@dataclass(frozen=True, slots=True)
class World:
    """Where services live and how to reach them.

    keys: what signs admin calls. clock: since the epoch. num_services: that this process looks after.
    """

    cluster: Cluster
    scraper: Scraper
    keys: Signer
    clock: Callable[[], float]
    num_services: Callable[[], int] = lambda: 1


@dataclass(slots=True)
class Carried:
    """What one pass of a service hands to the next.

    The controller's memory, the spec that was accepted last, what is saved of both, what was counted of a
    canary, what failed.
    """

    memory: Memory | None = None
    accepted: Accepted | None = None
    saved: Mapping[str, Any] | None = None  # what the checkpoint held, until there is a memory
    checkpoint: str = ""  # the hash of what is saved: the whole would be half of what a service takes
    checkpointed_at: float = -math.inf
    checkpointed: Accepted | None = None
    evidence: CanaryEvidence | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    has_told: bool = False  # whether this operator has written a status yet


@dataclass(slots=True)
class Outcome:
    """What a pass saw, decided and could not do; what it did not reach is None.

    problems: (step, message) of this pass; problem_reason: in the condition Degraded, for the first of them.
    earlier_problems: of the last, which were logged then.
    """

    key: ServiceKey
    status: Mapping[str, Any]
    observed: Observed | None = None
    sample: Sample | None = None
    decision: Decision | None = None
    gate: Gate | None = None
    rollout: Rollout | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    earlier_problems: list[tuple[str, str]] = field(default_factory=list)
    problem_reason: str = ""

    @property
    def wakers(self) -> tuple[str, ...]:
        """Addresses of gateways whose first waiting request wakes the service; none while it is awake."""
        if self.observed is None or self.decision is None or self.decision.cause not in SLEEPING_CAUSES:
            return ()
        return self.observed.gateway.addresses

    def refusal_of(self, revision: str) -> str:
        """Why the last pass could not apply a revision's own object, or ""."""
        steps = {f"apply {child.kind} {child.name}" for child in names.revision_children(revision)}
        return next((message for step, message in self.earlier_problems if step in steps), "")

    def refuse(self, error: SpecError) -> None:
        """Record that a spec cannot be honoured; a defect of the operator is logged as well, once."""
        is_defect = isinstance(error, InternalError)
        problem = (RENDER_STEP if is_defect else READ_STEP, str(error))
        self.problems.append(problem)
        if is_defect and problem not in self.earlier_problems:
            logger.error("%s: the operator fails over the spec", self.key, exc_info=error)

    async def attempt(self, step: str, action: Awaitable[object]) -> bool:
        """Do it; a failure is recorded and False is returned."""
        try:
            await action
        except NotLeadingError:
            raise  # nothing further may be written by this pass
        except HeadwayOperatorError as error:
            problem = (step, str(error))
            self.problems.append(problem)
            self.problem_reason = self.problem_reason or error.condition_reason
            level = logging.DEBUG if problem in self.earlier_problems else logging.WARNING
            logger.log(level, "%s: %s failed and is tried again: %s", self.key, *problem)
            return False
        return True


async def reconcile(world: World, manifest: Manifest, carried: Carried) -> Outcome:
    """Take one pass over the service as `manifest` now has it, its last status included.

    Raises ClusterError when the cluster cannot be observed or the checkpoint not be read.
    """
    cluster, key = world.cluster, key_of(manifest)
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
    target = target_of(service.spec, conditions.longest_start_seconds(service))
    decision, carried.memory = decide(target, memory, sample, observed, world.clock())
    outcome.decision = decision = with_end_to_end(decision, target, carried.memory)
    wanted = wanted_replicas(service, decision)
    unmade = outcome.refusal_of(rendered.revision.name)
    rendered, rollout = follow(
        service, rendered, observed, sample, wanted, gate, carried.evidence, world.clock(), unmade
    )
    outcome.rollout, carried.evidence = rollout, rollout.evidence
    todo = plan(service, rendered, observed, sample, decision, rollout)
    await _act(cluster, world.scraper, outcome, todo, observed)
    of_the_spec = (READ_STEP, RENDER_STEP)
    messages = tuple(f"{step}: {message}" for step, message in outcome.problems if step not in of_the_spec)
    problems = conditions.Problems(messages, outcome.problem_reason or HeadwayOperatorError.condition_reason)
    status = conditions.status(
        service, rendered, observed, sample, decision, world.clock(), problems, gate, rollout, lack
    )
    if refusal is not None:
        status = conditions.standing(status, manifest, refusal, world.clock())
    await _tell(world, outcome, status, carried)
    await _checkpoint(world, service, outcome, carried)
    return outcome


# A service, why it cannot be started, what there is of it, what that measured, its children, its judgement.
Read = tuple[Service, conditions.Lack | None, Observed, Sample, Rendered, Gate | None]


async def _read(world: World, manifest: Manifest, outcome: Outcome) -> Read:
    """Steps 1 to 5, by the spec of this manifest. Raises SpecError where that cannot be honoured."""
    cluster, key = world.cluster, outcome.key
    with as_internal_error():
        parsed = parse(manifest)
    service, lack = await _with_caches(cluster, parsed)
    outcome.observed = observed = outcome.observed or await cluster.observe(key)
    outcome.sample = sample = outcome.sample or await world.scraper.sample(key, observed)
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
    for replica, body in todo.patch.items():
        if address := addresses.get(replica):
            await outcome.attempt(f"patch limits of {replica}", scraper.patch_limits(key, address, body))
    for address, routing in todo.route.items():
        await outcome.attempt(f"route at {address}", scraper.route(key, address, routing))


async def _tell(world: World, outcome: Outcome, status: Mapping[str, Any], carried: Carried) -> None:
    """Write the status when it says something new, and once when an operator starts; then its events."""
    status = world.cluster.declared(status)
    previous, outcome.status = outcome.status, status
    if carried.has_told and not conditions.worth_writing(previous, status, world.clock()):
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
    period = max(CHECKPOINT_SECONDS, world.num_services() / MOST_CHECKPOINTS_PER_SECOND)
    is_due = now - carried.checkpointed_at >= period or spec != carried.checkpointed
    if carried.memory is None or not is_due:
        return
    data = carried.memory.to_dict() | ({} if spec is None else {"accepted": spec.to_dict()})
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    if digest == carried.checkpoint:
        return
    if await outcome.attempt("save memory", world.cluster.save_memory(service.key, data)):
        carried.checkpoint, carried.checkpointed_at, carried.checkpointed = digest, now, spec


def _child(manifest: Manifest) -> str:
    child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
    return f"{child.kind} {child.name}"
