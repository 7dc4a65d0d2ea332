"""One simulation: the events of a service under a trace, in order of time.

| event            | what happens                                                                           |
| ---              | ---                                                                                    |
| a request comes  | the gateway gives it to a replica, or holds it                                         |
| an engine wakes  | a turn of its loop ends: first bytes and ends become known, the next turn begins       |
| a pass           | samples are taken; a scrape's delay later `decide` and `plan` act upon them             |
| a pod changes    | it becomes ready, has drained, dies, or finds room on a node (`pods`)                  |

Everything random is drawn from the seed, a stream for each purpose, so that two controllers meet the same
requests, lose the same samples of the replicas that both have, and wait as long for cold starts on average.
Time begins at BEGIN_SECONDS: to the controller 0 means never.
"""

import heapq
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic

from headway_operator.errors import ScrapeError
from headway_operator.plan import plan
from headway_operator.samples import ReplicaSample, Sample
from headway_operator.slo import Target, target_of
from headway_operator.spec import Service
from headway_operator.state import Observed, Plan
from headway_runtime.config import Limits, Targets
from headway_simulator.control import (
    GATEWAY_ADDRESS,
    AnyMemory,
    Controller,
    observed,
    rendered,
    replica_sample,
    scale_of,
)
from headway_simulator.engine import EngineSettings, SimulatedEngine
from headway_simulator.gateway import Gateway, RoutingRule
from headway_simulator.pods import Deployment, Pod
from headway_simulator.prompts import Prompts
from headway_simulator.records import Allowance, Flight, Run, pass_of
from headway_simulator.trace import Trace

BEGIN_SECONDS = 86400.0
# Requests that are still under way so long after the load has ended count as unfinished.
GRACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a service meets besides its load.

    cold_start_seconds: from a pod's place on a node until it is ready; each differs from it by up to
    cold_start_spread, as a share. most_pods: that nodes have room for. missing_samples: the share of samples,
    of replicas and of the gateway, that do not come. deaths_per_pod_hour: of ready pods. initial_replicas:
    ready when the load begins. interval_seconds: between two passes; the operator's default.
    step_time_error: the controller is told of steps, and of the time between tokens by which it would put
    that right, so many times as long as they are, so that what it learns of a replica's capacity is wrong.
    routing: how the gateway chooses a replica.
    """

    initial_replicas: int = 1
    cold_start_seconds: float = 60.0
    cold_start_spread: float = 0.0
    most_pods: int = 1000
    interval_seconds: float = 5.0
    scrape_delay_seconds: float = 0.05
    missing_samples: float = 0.0
    deaths_per_pod_hour: float = 0.0
    step_time_error: float = 1.0
    routing: RoutingRule = "least-loaded"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything but the load and the controller."""

    service: Service
    engine: EngineSettings
    conditions: Conditions = field(default_factory=Conditions)


Told = Callable[[float], None]


class Simulation(Generic[AnyMemory]):
    """controller: None leaves replicas and limits as they begin. told: the share of the load that is past."""

    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        controller: Controller[AnyMemory] | None,
        told: Told = lambda share: None,
    ) -> None:
        self._setting = setting
        self._controller = controller
        self._memory: AnyMemory | None = None
        self._told = told
        self._conditions = conditions = setting.conditions
        self._target: Target = target_of(setting.service.spec, conditions.cold_start_seconds)
        self.run = Run(BEGIN_SECONDS, BEGIN_SECONDS + trace.duration_seconds)
        self.run.flights = [Flight(one, BEGIN_SECONDS + one.at_seconds) for one in trace.arrivals]
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._order = count()
        self._num_ended = 0
        self._allowance: Allowance | None = None
        self._prompts = Prompts()
        self._cold_starts = random.Random(f"cold starts {conditions.seed}")
        self._deaths = random.Random(f"deaths {conditions.seed}")
        self.deployment = Deployment(
            conditions.most_pods,
            float(setting.service.spec.drain_timeout_seconds),
            self._cold_start,
            self._later,
            self._pod_ready,
            self._pod_gone,
        )
        self._gateway = Gateway(
            self.run.flights, lambda: self.deployment.living, self._send, conditions.routing
        )

    def result(self, stops_after: range | None = None, allowance: Allowance | None = None) -> Run:
        """Run it to its end. With stops_after: until each request of these numbers has ended, or is too late
        for the TTFT target. With an allowance: until that is spent."""
        self._allowance = allowance
        self.deployment.start_ready(self._conditions.initial_replicas, BEGIN_SECONDS)
        if self._controller is not None:
            self._later(BEGIN_SECONDS, self._sample)
        if self.run.flights:
            self._later(self.run.flights[0].arrived_at, lambda now: self._arrive(0, now))
        last_at = self.run.ends_at + GRACE_SECONDS
        ended_at = BEGIN_SECONDS
        while self._events and self._events[0][0] <= last_at:
            now, _, _, act = heapq.heappop(self._events)
            act(now)
            ended_at = now
            if now >= self.run.ends_at and self._gateway.num_open == 0:
                break
            if stops_after is not None and not self._is_any_open(stops_after, now):
                break
            if allowance is not None and allowance.is_spent:
                break
        self.run.pods = [life for pod in self._all_pods if (life := pod.life()) is not None]
        for pod in self.deployment.living:
            if pod.engine is not None:
                pod.engine.catch_up(ended_at)
        for pod in self._all_pods:
            self._count(pod)
        return self.run

    def _is_any_open(self, numbers: range, now: float) -> bool:
        """Whether what becomes of one of them is not known yet. They come in order, and mostly end so."""
        flights, target = self.run.flights, self._target.targets.ttft_milliseconds
        while self._num_ended < len(numbers):
            flight = flights[numbers[self._num_ended]]
            if flight.fate == "unfinished" and not flight.is_late(now, target):
                return True
            self._num_ended += 1
        return False

    @property
    def _all_pods(self) -> list[Pod]:
        return [*self.deployment.gone, *self.deployment.living]

    def _later(self, at: float, act: Callable[[float], None], rank: int = 0) -> None:
        """Of what happens at the same moment, engines wake last: what comes then comes before their turns."""
        heapq.heappush(self._events, (at, rank, next(self._order), act))

    def _arrive(self, number: int, now: float) -> None:
        following = number + 1
        if following < len(self.run.flights):
            self._later(self.run.flights[following].arrived_at, lambda at: self._arrive(following, at))
        if self._gateway.receive(number, now):
            gives_up_at = now + self._gateway.routing.waiting_timeout_seconds
            self._later(gives_up_at, lambda at: self._gateway.give_up(number))

    def _send(self, pod: Pod, number: int, now: float) -> bool:
        engine, flight = pod.engine, self.run.flights[number]
        assert engine is not None
        request = self._prompts.request(str(number), flight.arrival, flight.arrived_at)
        settings = engine.settings
        keys: list[bytes] = []
        if settings.enable_prefix_caching:
            keys = self._prompts.block_keys(flight.arrival, settings.block_size)
        taken = engine.add(request, self._prompts.answer_token(), now, keys)
        self._wake_later(pod, engine)
        return taken

    def _wake_later(self, pod: Pod, engine: SimulatedEngine) -> None:
        """An event for when the engine wakes; one that was asked for earlier no longer counts."""
        wakes_at = engine.wakes_at
        if wakes_at < math.inf and wakes_at != pod.event_at:
            pod.event_at = wakes_at
            self._later(wakes_at, lambda now: self._wake(pod, engine, now), rank=1)

    def _wake(self, pod: Pod, engine: SimulatedEngine, now: float) -> None:
        if pod.phase == "gone" or now != pod.event_at:
            return
        pod.event_at = None
        emitted = engine.wake()
        for name, ttft_seconds in emitted.first:
            scheduler = engine.scheduler
            limit = scheduler.limits.max_num_seqs
            self._gateway.answered(int(name), pod, now, scheduler.late_share, limit)
            self.run.flights[int(name)].ttft_seconds = ttft_seconds
        for name, tpot_seconds in emitted.ended:
            self.run.flights[int(name)].tpot_seconds = tpot_seconds
            self._gateway.finished(int(name), now)
            if self._allowance is not None:
                self._allowance.ended(int(name), self.run.flights[int(name)])
        if emitted.ended and pod.phase == "draining" and pod.in_flight == 0:
            self.deployment.drained(pod, now)
        self._wake_later(pod, engine)

    def _pod_ready(self, pod: Pod, now: float) -> None:
        pod.engine = SimulatedEngine(
            self._setting.engine,
            now,
            f"{self._conditions.seed} {pod.name}",
            self._conditions.step_time_error,
        )
        rate = self._conditions.deaths_per_pod_hour
        if rate:
            self._later(now + self._deaths.expovariate(rate / 3600), lambda at: self._die(pod, at))
        self._gateway.wake_held(now)

    def _die(self, pod: Pod, now: float) -> None:
        if pod.phase != "gone":
            self.deployment.die(pod, now)

    def _pod_gone(self, pod: Pod, now: float) -> None:
        if pod.engine is not None:
            pod.engine.catch_up(now)
            self._gateway.lost(pod, [int(name) for name in pod.engine.live_requests])

    def _cold_start(self) -> float:
        conditions = self._conditions
        spread = conditions.cold_start_spread
        return conditions.cold_start_seconds * (1 + self._cold_starts.uniform(-spread, spread))

    def _sample(self, now: float) -> None:
        """A pass begins: what is observed and sampled now is decided upon a moment later."""
        self._told(min(1.0, (now - self.run.starts_at) / (self.run.ends_at - self.run.starts_at)))
        pods = list(self.deployment.living)
        seen = observed(self._setting.service, self.deployment.replicas, pods, BEGIN_SECONDS)
        highest = self._target.highest
        samples: dict[str, ReplicaSample | None] = {}
        errors: dict[str, str] = {}
        for pod in pods:
            if pod.engine is None:
                continue
            if not self._is_missing(pod.name, now):
                samples[pod.name] = replica_sample(pod, pod.engine, highest, now)
                self._wake_later(pod, pod.engine)
            elif pod.phase == "ready":
                samples[pod.name] = None
                errors[pod.name] = str(
                    ScrapeError(f"GET http://{pod.name}/admin/sample: no answer within 2 s")
                )
        is_missing = self._is_missing(GATEWAY_ADDRESS, now)
        gateways = {GATEWAY_ADDRESS: None if is_missing else self._gateway.sample(now)}
        sample = Sample(now, samples, gateways, errors)
        self._later(now + self._conditions.scrape_delay_seconds, lambda at: self._decide(sample, seen, at))

    def _is_missing(self, address: str, now: float) -> bool:
        """Whether a sample does not come: drawn for each address and moment, so that controllers with other
        numbers of replicas lose the same ones of those that both have."""
        share = self._conditions.missing_samples
        draw = f"missing samples {self._conditions.seed} {address} {now}"
        return share > 0 and random.Random(draw).random() < share

    def _decide(self, sample: Sample, seen: Observed, now: float) -> None:
        controller, service = self._controller, self._setting.service
        assert controller is not None
        if self._memory is None:
            self._memory = controller.begin(sample, now)
        decision, self._memory = controller.decide(self._target, self._memory, sample, seen, now)
        ready = sum(one.phase == "ready" for one in seen.replicas)
        pending = sum(one.phase in ("pending", "starting") for one in seen.replicas)
        num_sampled = sum(one is not None for one in sample.replicas.values())
        self.run.passes.append(pass_of(decision, ready, pending, num_sampled))
        self._act(plan(service, rendered(service), seen, sample, decision), now)
        # As in the operator's loop, an interval lies between the times at which passes are due.
        following = sample.taken_at + self._conditions.interval_seconds
        if following <= self.run.ends_at:
            self._later(max(now, following), self._sample)

    def _act(self, todo: Plan, now: float) -> None:
        pods = {pod.name: pod for pod in self.deployment.living}
        for name, cost in todo.deletion_costs.items():
            if name in pods:
                pods[name].deletion_cost = cost
        replicas = scale_of(todo, self._setting.service)
        if replicas is not None:
            self.deployment.scale(replicas, now)
        for name, body in todo.patch.items():
            pod = pods.get(name)
            if pod is None or pod.engine is None or pod.phase == "gone":
                continue
            self._patch(pod.engine, body, now)
            self._wake_later(pod, pod.engine)
        for routing in todo.route.values():
            self._gateway.routing = routing

    def _patch(self, engine: SimulatedEngine, body: Mapping[str, Any], now: float) -> None:
        """As the replica's PATCH /admin/limits does."""
        if "max_num_seqs" in body:
            engine.set_limits(Limits(body["max_num_seqs"], body["max_num_batched_tokens"]), now)
        targets = engine.metrics.targets
        names = ("ttft_milliseconds", "tpot_milliseconds")
        wanted = {name: body.get(name, getattr(targets, name)) for name in names}
        engine.set_targets(Targets(**wanted), now)

    def _count(self, pod: Pod) -> None:
        if pod.engine is not None:
            counters = pod.engine.metrics.snapshot().counters
            self.run.num_preemptions += counters["preemptions"]
            self.run.num_prompt_tokens += counters["prompt_tokens"]
            self.run.num_cached_tokens += counters["cached_tokens"]
