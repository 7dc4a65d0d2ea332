"""Which replica takes a request, and who waits while none can: the gateway's rule, without its HTTP.

The ready replica with the fewest requests in flight; among equals the one picked longest ago; one that
answered 503 moments ago after all others. A request that all refuse is answered 503. Where no replica is
ready a request waits, first in first out, until its deadline. Numbers are the gateway's defaults
(`headway gateway --help`).

What a dying replica had in hand is lost: before the first byte the gateway answers with an error
(`rejected`), after it the stream breaks off (`failed`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from headway_operator.state import GatewaySample
from headway_simulator.pods import Pod
from headway_simulator.records import Fate, Flight

MAX_WAITING = 1024
WAITING_TIMEOUT_SECONDS = 30.0
BUSY_SECONDS = 0.5

# Gives a request to a pod; False if that refuses it.
Send = Callable[[Pod, int, float], bool]


class Gateway:
    """flights: all requests by number. pods: those that exist now."""

    def __init__(self, flights: list[Flight], pods: Callable[[], Iterable[Pod]], send: Send) -> None:
        self._flights = flights
        self._pods = pods
        self._send = send
        self._pod_of: dict[int, Pod] = {}
        self._held: OrderedDict[int, None] = OrderedDict()
        self._num_picks = 0
        self._counters: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._pod_of) + len(self._held)

    def receive(self, number: int, now: float) -> bool:
        """A request has come; whether it is held until a replica is ready."""
        self._counters["received"] += 1
        if self._held or not self._forward(number, now):
            if len(self._held) >= MAX_WAITING:
                self._end(number, "rejected", "rejected")
                return False
            self._held[number] = None
            return True
        return False

    def give_up(self, number: int) -> None:
        """A held request's time is up, if it is still held."""
        if number in self._held:
            del self._held[number]
            self._end(number, "rejected", "rejected")

    def wake_held(self, now: float) -> None:
        """A replica has become ready."""
        while self._held:
            number = next(iter(self._held))
            if not self._forward(number, now):
                return
            del self._held[number]

    def answered(self) -> None:
        """A replica has sent an answer's head."""
        self._counters["forwarded"] += 1

    def finished(self, number: int, now: float) -> Pod:
        """An answer is complete; the pod that gave it."""
        flight = self._flights[number]
        flight.finished_at = now
        self._end(number, "finished", "finished")
        pod = self._pod_of.pop(number)
        pod.in_flight -= 1
        return pod

    def lost(self, pod: Pod, numbers: Iterable[int]) -> None:
        """A pod is gone with these in hand."""
        for number in numbers:
            del self._pod_of[number]
            pod.in_flight -= 1
            self._end(number, "lost", "rejected" if self._flights[number].ttft_seconds is None else "failed")

    def sample(self, now: float) -> GatewaySample:
        """As its `/admin/sample` reads."""
        oldest = next(iter(self._held), None)
        return GatewaySample(
            instance="gateway",
            taken_at=now,
            waiting=len(self._held),
            oldest_waiting_seconds=0.0 if oldest is None else now - self._flights[oldest].arrived_at,
            in_flight=len(self._pod_of),
            counters={
                name: self._counters[name]
                for name in (
                    "received",
                    "forwarded",
                    "finished",
                    "rejected",
                    "retried",
                    "failed",
                    "client_aborted",
                )
            },
        )

    def _forward(self, number: int, now: float) -> bool:
        """Whether a replica was found, be it one that refused for all."""
        refused_by: set[Pod] = set()
        while True:
            ready = [pod for pod in self._pods() if pod.phase == "ready" and pod not in refused_by]
            if not ready:
                break
            pod = min(ready, key=lambda one: (now < one.busy_until, one.in_flight, one.last_picked))
            self._num_picks += 1
            pod.last_picked = self._num_picks
            if refused_by:
                self._counters["retried"] += 1
            if self._send(pod, number, now):
                pod.in_flight += 1
                self._pod_of[number] = pod
                return True
            pod.busy_until = now + BUSY_SECONDS
            refused_by.add(pod)
        if not refused_by:
            return False
        self._end(number, "rejected", "rejected")
        return True

    def _end(self, number: int, fate: Fate, counter: str) -> None:
        self._flights[number].fate = fate
        self._counters[counter] += 1
