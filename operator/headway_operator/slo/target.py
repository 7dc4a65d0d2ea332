"""What the controller is asked to hold: the promise and the bounds, read from a service's spec."""

from dataclasses import dataclass

from headway_operator.samples import Limits, Targets
from headway_operator.slo.build import UNKNOWN, Build, build_of
from headway_operator.slo.window import LONGEST_SECONDS
from headway_operator.spec import InferenceServiceSpec
from headway_operator.spec.schedule import ScheduleEntry


@dataclass(frozen=True, slots=True)
class Target:
    """The promise and the bounds.

    window_seconds: how far back requests are judged at most.
    fixed_replicas: None while autoscaled. lowest, highest: ends of the envelope of the batch limits.
    initial: limits at start. stabilization_seconds: how long fewer replicas must have been enough.
    may_sleep: whether there need be no replica while nobody asks. idle_seconds: for how long nobody must have
    asked; None: as long as start-up times call for (`sleep`).
    schedule, start_seconds: other bounds at other times, and what a replica takes to start, for which they
    hold early (`schedule`). because: the entries that today's bounds come from, in words, or "". build: what
    replicas are.
    """

    targets: Targets
    percentile: int
    window_seconds: float
    fixed_replicas: int | None
    min_replicas: int
    max_replicas: int
    stabilization_seconds: float
    lowest: Limits
    highest: Limits
    initial: Limits
    is_suspended: bool = False
    may_sleep: bool = False
    idle_seconds: float | None = None
    schedule: tuple[ScheduleEntry, ...] = ()
    start_seconds: float = 0.0
    because: str = ""
    build: Build = UNKNOWN

    @property
    def patience_seconds(self) -> float:
        """How long a first token may take; 0 without such a target."""
        return 0.001 * (self.targets.ttft_milliseconds or 0.0)

    def bound_replicas(self, replicas: int) -> int:
        """The nearest allowed number of replicas."""
        if self.fixed_replicas is not None:
            return self.fixed_replicas
        return max(self.min_replicas, min(self.max_replicas, replicas))

    def bound_limits(self, limits: Limits) -> Limits:
        """The nearest allowed limits; a step always has room for one token of each sequence."""
        seqs = max(self.lowest.max_num_seqs, min(self.highest.max_num_seqs, limits.max_num_seqs))
        lowest_tokens = max(self.lowest.max_num_batched_tokens, seqs)
        tokens = max(lowest_tokens, min(self.highest.max_num_batched_tokens, limits.max_num_batched_tokens))
        return Limits(seqs, tokens)

    def with_token_budget(self, tokens: int) -> Limits:
        """The allowed limits with the budget that is nearest to this, and as many sequences as it has room
        for."""
        return self.bound_limits(Limits(min(self.highest.max_num_seqs, tokens), tokens))


def target_of(spec: InferenceServiceSpec, start_seconds: float = 0.0) -> Target:
    """Read the promise and the bounds from a spec. start_seconds: what a replica takes to start, if known."""
    slo, scaling, batching = spec.slo, spec.scaling, spec.batching
    ttft = slo.ttft_milliseconds if slo else None
    tpot = slo.tpot_milliseconds if slo else None
    end_to_end = slo.end_to_end_milliseconds if slo else None
    return Target(
        targets=Targets(
            None if ttft is None else float(ttft),
            None if tpot is None else float(tpot),
            None if end_to_end is None else float(end_to_end),
        ),
        percentile=slo.percentile if slo else 95,
        window_seconds=float(slo.window_seconds) if slo else LONGEST_SECONDS,
        fixed_replicas=spec.replicas,
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        stabilization_seconds=float(scaling.stabilization_seconds),
        lowest=Limits(batching.max_num_seqs.min, batching.max_num_batched_tokens.min),
        highest=Limits(*spec.highest_limits),
        initial=Limits(*spec.initial_limits),
        is_suspended=spec.suspend,
        may_sleep=spec.replicas is None and scaling.min_replicas == 0,
        idle_seconds=None if scaling.idle_seconds is None else float(scaling.idle_seconds),
        schedule=tuple(scaling.schedule),
        start_seconds=start_seconds,
        build=build_of(spec),
    )
