"""The pods of one Deployment: placed on nodes while there is room, started, ready, drained, gone.

| from        | to          | when                                                                          |
| ---         | ---         | ---                                                                           |
| unscheduled | starting    | a node has room for it; the first created first                               |
| starting    | ready       | after its cold start                                                          |
| ready       | draining    | the Deployment shrinks; it takes no request any more and finishes those it has |
| draining    | gone        | it has none left, and none came for QUIET_SECONDS; or its time to drain is up  |
| any         | gone        | it dies, or is removed before it is ready                                     |

A Deployment that shrinks removes as Kubernetes does: those on no node first, then those not ready, then the
lowest deletion cost, then the youngest. A pod that dies is replaced by a new one.

Decides nothing about load and reads no clock: `now` is passed in, and events are asked for from `Later`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from headway_gateway.load import ReplicaLoad
from headway_operator.state import Replica, Start
from headway_simulator.engine import SimulatedEngine
from headway_simulator.records import PodLife

Phase = Literal["unscheduled", "starting", "ready", "draining", "gone"]
# Asks for a call at a time.
Later = Callable[[float, Callable[[float], None]], None]

# A replica that was told to stop exits once nothing is in flight and nothing has come for so long.
QUIET_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Pod(ReplicaLoad):
    """One replica. event_at: when its engine is next woken."""

    name: str
    created_at: float
    phase: Phase = "unscheduled"
    placed_at: float | None = None
    ready_at: float | None = None
    gone_at: float | None = None
    deletion_cost: int = 0
    engine: SimulatedEngine | None = None
    event_at: float | None = None

    def as_replica(self, revision: str) -> Replica:
        """As the cluster reports it."""
        phases: dict[Phase, Literal["pending", "starting", "ready", "draining"]] = {
            "unscheduled": "pending",
            "starting": "starting",
            "ready": "ready",
            "draining": "draining",
        }
        return Replica(
            name=self.name,
            revision=revision,
            phase=phases[self.phase],
            address=f"http://{self.name}",
            created_at=self.created_at,
            ready_at=self.ready_at,
            reason="Unschedulable" if self.phase == "unscheduled" else "",
            deletion_cost=self.deletion_cost,
            start=self._start(),
        )

    def _start(self) -> Start | None:
        if self.placed_at is None or self.ready_at is None:
            return None
        return Start(self.placed_at - self.created_at, 0.0, 0.0, self.ready_at - self.placed_at)

    def life(self) -> PodLife | None:
        """None if it was never placed."""
        if self.placed_at is None:
            return None
        return PodLife(self.name, self.placed_at, self.ready_at, self.gone_at)


class Deployment:
    """most_pods: that nodes have room for. cold_start_seconds: of the next pod, asked once each.

    on_ready: a pod is ready; it needs an engine. on_gone: it is gone, with whatever it had in flight.
    """

    def __init__(
        self,
        most_pods: int,
        drain_timeout_seconds: float,
        cold_start_seconds: Callable[[], float],
        later: Later,
        on_ready: Callable[[Pod, float], None],
        on_gone: Callable[[Pod, float], None],
    ) -> None:
        self.replicas = 0
        self.living: list[Pod] = []
        self.gone: list[Pod] = []
        self._most_pods = most_pods
        self._drain_timeout_seconds = drain_timeout_seconds
        self._cold_start_seconds = cold_start_seconds
        self._later = later
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._num_created = 0

    def scale(self, replicas: int, now: float) -> None:
        """Have so many pods that are not draining."""
        self.replicas = replicas
        staying = [pod for pod in self.living if pod.phase != "draining"]
        for _ in range(len(staying), replicas):
            self._num_created += 1
            self.living.append(Pod(f"pod-{self._num_created}", now))
        removed = sorted(staying, key=_first_to_go)[: max(0, len(staying) - replicas)]
        for pod in removed:
            self._remove(pod, now)
        self._place(now)

    def start_ready(self, replicas: int, now: float) -> None:
        """Begin with so many pods that are ready already."""
        self.scale(replicas, now)
        for pod in self.living:
            self._become_ready(pod, now)

    def die(self, pod: Pod, now: float) -> None:
        """A pod is gone from one moment to the next; another one is made in its place."""
        self._end(pod, now)
        self.scale(self.replicas, now)

    def drained(self, pod: Pod, now: float) -> None:
        """The last request of a draining pod has ended."""
        self._later(now + QUIET_SECONDS, lambda at: self._end(pod, at))

    def _remove(self, pod: Pod, now: float) -> None:
        if pod.phase != "ready":
            self._end(pod, now)
            return
        pod.phase = "draining"
        if pod.in_flight == 0:
            self.drained(pod, now)
        else:
            self._later(now + self._drain_timeout_seconds, lambda at: self._end(pod, at))

    def _end(self, pod: Pod, now: float) -> None:
        if pod.phase == "gone":
            return
        pod.phase, pod.gone_at = "gone", now
        self.living.remove(pod)
        self.gone.append(pod)
        self._on_gone(pod, now)
        self._place(now)

    def _place(self, now: float) -> None:
        num_placed = sum(pod.phase != "unscheduled" for pod in self.living)
        for pod in self.living:
            if num_placed >= self._most_pods:
                return
            if pod.phase == "unscheduled":
                num_placed += 1
                pod.phase, pod.placed_at = "starting", now
                self._later(now + self._cold_start_seconds(), partial(self._become_ready, pod))

    def _become_ready(self, pod: Pod, now: float) -> None:
        if pod.phase == "starting":
            pod.phase, pod.ready_at = "ready", now
            self._on_ready(pod, now)


def _first_to_go(pod: Pod) -> tuple[bool, bool, int, float]:
    return (pod.phase != "unscheduled", pod.phase == "ready", pod.deletion_cost, -pod.created_at)
