"""What a pass is given, what it hands to the next one, and what came of it."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headway_operator import names
from headway_operator.cluster.protocol import Cluster
from headway_operator.errors import HeadwayOperatorError, InternalError, NotLeadingError, SpecError
from headway_operator.in_force import Accepted
from headway_operator.keys import Signer
from headway_operator.quality import Gate
from headway_operator.rollout import CanaryEvidence, Rollout
from headway_operator.samples import Sample
from headway_operator.scrape import Scraper
from headway_operator.slo import Memory
from headway_operator.state import Decision, Observed, ServiceKey

logger = logging.getLogger(__name__)

READ_STEP = "read"  # which fails where a spec cannot be honoured
# Where the operator itself fails over one.
RENDER_STEP, DECIDE_STEP, STATUS_STEP = "render", "decide", "status"
SLEEPING_CAUSES = ("Idle", "Asleep")


async def _at_once(_: ServiceKey) -> None:
    """Of passes that share the processor with no others."""


@dataclass(frozen=True, slots=True)
class World:
    """Where services live and how to reach them.

    keys: what signs admin calls. clock: since the epoch. num_services: that this process looks after.
    pace: awaited by a pass before each of its longer computations (`turns`).
    interval_seconds: between two passes.
    """

    cluster: Cluster
    scraper: Scraper
    keys: Signer
    clock: Callable[[], float]
    num_services: Callable[[], int] = lambda: 1
    pace: Callable[[ServiceKey], Awaitable[None]] = _at_once
    interval_seconds: float = 5.0


class Problem(NamedTuple):
    """What a pass could not do. error: the class of what was raised."""

    step: str
    message: str
    error: str

    @property
    def kind_of_step(self) -> str:
        """Without what it was to be done to: `apply`, `scale`, `write`."""
        return self.step.split()[0]


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
    problems: list[Problem] = field(default_factory=list)
    has_told: bool = False  # whether this operator has written a status yet


@dataclass(slots=True)
class Outcome:
    """What a pass saw, decided and could not do; what it did not reach is None.

    problem_reason: in the condition Degraded, for the first of the problems.
    earlier_problems: of the last, which were logged then.
    """

    key: ServiceKey
    status: Mapping[str, Any]
    observed: Observed | None = None
    sample: Sample | None = None
    decision: Decision | None = None
    gate: Gate | None = None
    rollout: Rollout | None = None
    problems: list[Problem] = field(default_factory=list)
    earlier_problems: list[Problem] = field(default_factory=list)
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
        return next((one.message for one in self.earlier_problems if one.step in steps), "")

    def refuse(self, error: SpecError, step: str = RENDER_STEP) -> None:
        """Record that a spec cannot be honoured; a defect of the operator, in `step`, is logged once."""
        is_defect = isinstance(error, InternalError)
        problem = Problem(step if is_defect else READ_STEP, str(error), type(error).__name__)
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
            problem = Problem(step, str(error), type(error).__name__)
            self.problems.append(problem)
            self.problem_reason = self.problem_reason or error.condition_reason
            level = logging.DEBUG if problem in self.earlier_problems else logging.WARNING
            logger.log(level, "%s: %s failed and is tried again: %s", self.key, step, error)
            return False
        return True
