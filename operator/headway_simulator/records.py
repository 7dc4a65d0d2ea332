"""What a simulation writes down: each request's end, each pod's life, each decision and what it changed."""

from dataclasses import dataclass, field
from typing import Literal

from headway_operator.samples import Limits
from headway_operator.state import Attainment, Decision
from headway_simulator.trace import Arrival

# rejected: answered 503. lost: a replica died, or was stopped, with it in hand. unfinished: still under way
# when the simulation ended.
Fate = Literal["unfinished", "finished", "rejected", "lost"]


@dataclass(slots=True)
class Flight:
    """One request on its way. Seconds from its arrival to the first byte; per token after the first.

    tpot_seconds is None until it has ended, and where the answer has one token.
    """

    arrival: Arrival
    arrived_at: float
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    finished_at: float | None = None
    fate: Fate = "unfinished"

    def meets(self, ttft_milliseconds: float | None, tpot_milliseconds: float | None) -> bool:
        """Whether it ended well, and within both targets."""
        return (
            self.fate == "finished"
            and _is_within(self.ttft_seconds, ttft_milliseconds)
            and _is_within(self.tpot_seconds, tpot_milliseconds)
        )

    def is_late(self, now: float, ttft_milliseconds: float | None) -> bool:
        """Whether its first byte came too late, or will."""
        seconds = now - self.arrived_at if self.ttft_seconds is None else self.ttft_seconds
        return not _is_within(seconds, ttft_milliseconds)


@dataclass(slots=True)
class Allowance:
    """How many requests from number `first` on may be answered to their end without meeting both targets; of
    those that are refused or lost whoever gives it knows afterwards."""

    first: int
    ttft_milliseconds: float | None
    tpot_milliseconds: float | None
    left: float

    @property
    def is_spent(self) -> bool:
        """Whether there were more."""
        return self.left < 0

    def ended(self, number: int, flight: Flight) -> None:
        """This one has, well or not."""
        if number >= self.first and not flight.meets(self.ttft_milliseconds, self.tpot_milliseconds):
            self.left -= 1


def _is_within(seconds: float | None, milliseconds: float | None) -> bool:
    return seconds is None or milliseconds is None or 1000 * seconds <= milliseconds


@dataclass(frozen=True, slots=True)
class PodLife:
    """A pod while it held its GPUs, from when it was placed on a node until it was gone."""

    name: str
    placed_at: float
    ready_at: float | None
    gone_at: float | None


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the controller: what was there, and what it wanted. num_sampled: replicas that gave a
    sample."""

    at: float
    replicas: int
    limits: Limits
    cause: str
    blocker: str
    message: str
    num_ready: int
    num_pending: int
    num_sampled: int
    ttft: Attainment
    tpot: Attainment


def pass_of(decision: Decision, num_ready: int, num_pending: int, num_sampled: int) -> Pass:
    """A decision and the replicas that it found."""
    return Pass(
        decision.at,
        decision.replicas,
        decision.limits,
        decision.cause,
        decision.blocker,
        decision.message,
        num_ready,
        num_pending,
        num_sampled,
        decision.ttft,
        decision.tpot,
    )


@dataclass(slots=True)
class Run:
    """Everything that one simulation wrote down. The load lasted from starts_at to ends_at."""

    starts_at: float
    ends_at: float
    flights: list[Flight] = field(default_factory=list)
    pods: list[PodLife] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
