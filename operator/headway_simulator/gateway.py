"""Which replica takes a request, and who waits while none can: the gateway's rule and counts, but no HTTP.

The ready replica at which a new one waits for the least (`headway_gateway.load`), all answers being streams.
Among equals the one picked longest ago; one that answered 503 moments ago after all others. A request
that all refuse is answered 503. Where no replica is ready a request waits, first in first out, until its
deadline. How many may wait, and for how long, is the `spec.waiting` that the operator's plan tells
(`routing`), and the gateway's defaults before it does.

Prefix-aware: the replica that was given the longest known beginning of the prompt, if that is at least
LEAST_SHARE of it, and while it has no more than MOST_LEAD requests in flight beyond the least loaded; else as
above. What a replica was given stands for what its cache holds, as in routers that see no cache (SGLang's
cache-aware one, whose rule this follows). The gateway that ships knows the first rule alone.

What a dying replica had in hand is lost: before the first byte the gateway answers with an error
(`rejected`), after it the stream breaks off (`failed`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Literal

from headway_gateway.load import Given, Pace
from headway_operator.samples import GatewaySample, Routing
from headway_simulator.pods import Pod
from headway_simulator.records import Fate, Flight
from headway_simulator.trace import Arrival

# Until the operator says what the service's spec does.
FIRST_ROUTING = Routing(max_waiting=1024, waiting_timeout_seconds=30.0)
LEAST_SHARE = 0.5
MOST_LEAD = 8

RoutingRule = Literal["least-loaded", "prefix-aware"]
# A block of a prompt: of which users, how long, the how many-th, its hash.
Block = tuple[int, int, int, int]

# Gives a request to a pod; False if that refuses it.
Send = Callable[[Pod, int, float], bool]


class Gateway:
    """flights: all requests by number. pods: those that exist now."""

    def __init__(
        self,
        flights: list[Flight],
        pods: Callable[[], Iterable[Pod]],
        send: Send,
        rule: RoutingRule = "least-loaded",
    ) -> None:
        self._flights = flights
        self._pods = pods
        self._send = send
        self._pod_of: dict[int, Pod] = {}
        self._given: dict[int, Given] = {}
        self._answered_at: dict[int, float] = {}
        self._pace = Pace()
        self._held: OrderedDict[int, None] = OrderedDict()
        self._num_picks = 0
        self._max_num_seqs: int | None = None  # as the latest of all answers said
        self._counters: Counter[str] = Counter()
        self._rule = rule
        self.routing = FIRST_ROUTING
        self._blocks_of: dict[Pod, set[Block]] = {}

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._pod_of) + len(self._held)

    def receive(self, number: int, now: float) -> bool:
        """A request has come; whether it is held until a replica is ready."""
        self._counters["received"] += 1
        if self._held or not self._forward(number, now):
            if len(self._held) >= self.routing.max_waiting:
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

    def answered(self, number: int, pod: Pod, now: float, late_share: float, max_num_seqs: int) -> None:
        """A replica has sent an answer's head, which says what share of its requests waits too late, and how
        many it computes at once."""
        self._counters["forwarded"] += 1
        pod.num_unanswered -= 1
        self._answered_at[number] = now
        pod.max_num_seqs = self._max_num_seqs = max_num_seqs
        pod.note_late_share(late_share)
        pod.note_answered(self._given.pop(number), self._pace, now)

    def finished(self, number: int, now: float) -> Pod:
        """An answer is complete; the pod that gave it."""
        flight = self._flights[number]
        flight.finished_at = now
        self._end(number, "finished", "finished")
        self._pace.ended(now - self._answered_at.pop(number))
        pod = self._pod_of.pop(number)
        pod.take_back()
        return pod

    def lost(self, pod: Pod, numbers: Iterable[int]) -> None:
        """A pod is gone with these in hand."""
        self._blocks_of.pop(pod, None)
        for number in numbers:
            del self._pod_of[number]
            self._given.pop(number, None)
            self._answered_at.pop(number, None)
            pod.in_flight -= 1
            pod.num_unanswered -= self._flights[number].ttft_seconds is None
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
            routing=self.routing,
        )

    def _forward(self, number: int, now: float) -> bool:
        """Whether a replica was found, be it one that refused for all."""
        refused_by: set[Pod] = set()
        while True:
            ready = [pod for pod in self._pods() if pod.phase == "ready" and pod not in refused_by]
            if not ready:
                break
            pod = self._choose(ready, number, now)
            self._num_picks += 1
            pod.last_picked = self._num_picks
            if refused_by:
                self._counters["retried"] += 1
            if self._send(pod, number, now):
                pod.in_flight += 1
                pod.num_unanswered += 1
                self._pod_of[number] = pod
                self._given[number] = pod.given(now)
                if self._rule == "prefix-aware":
                    self._blocks_of.setdefault(pod, set()).update(_blocks(self._flights[number].arrival))
                return True
            pod.note_busy(now)
            refused_by.add(pod)
        if not refused_by:
            return False
        self._end(number, "rejected", "rejected")
        return True

    def _choose(self, ready: Sequence[Pod], number: int, now: float) -> Pod:
        for pod in ready:
            if pod.max_num_seqs is None:
                pod.max_num_seqs = self._max_num_seqs
        least = min(ready, key=lambda one: one.rank(self._pace, now))
        blocks = _blocks(self._flights[number].arrival) if self._rule == "prefix-aware" else []
        if not blocks:
            return least
        known = {pod: self._num_known(pod, blocks) for pod in ready if now >= pod.busy_until}
        best = max(known, key=lambda one: (known[one], -one.load(self._pace)), default=least)
        is_worth_it = known.get(best, 0) >= LEAST_SHARE * len(blocks)
        return best if is_worth_it and best.num_met <= least.num_met + MOST_LEAD else least

    def _num_known(self, pod: Pod, blocks: Sequence[Block]) -> int:
        given = self._blocks_of.get(pod, set())
        return sum(1 for _ in takewhile(given.__contains__, blocks))

    def _end(self, number: int, fate: Fate, counter: str) -> None:
        self._flights[number].fate = fate
        self._counters[counter] += 1


def _blocks(arrival: Arrival) -> list[Block]:
    return [
        (arrival.user_space, arrival.hash_block_tokens, index, hash_id)
        for index, hash_id in enumerate(arrival.hash_ids)
    ]
