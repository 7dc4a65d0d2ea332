"""A planner like Dynamo's, in its SLA mode: a profile made beforehand, a forecast, two correction factors.

Source: NVIDIA Dynamo, docs/architecture/sla_planner.md: each adjustment interval (180 s), with the constant
predictor (the next interval is like this one) and means over the interval:

    prefill correction = measured TTFT / TTFT of the profile at the mean prompt
    decode correction  = measured ITL / ITL of the profile at the concurrency and context there were
    prefill workers    = requests * prompt / interval * min(1, prefill correction) / prefill tokens per second
    decode workers     = requests * answer / interval / most tokens per second with ITL <= target / correction

Its prefill and decode workers are of two kinds; a replica here does both, a part of its time each, so that
the two needs are added up before rounding. Prefills take the profile of one prompt at a time, decodes that
of steps of up to max_num_seqs.

What there is to tune: the interval, and a share of the ITL target that is aimed at instead of all of it.
"""

import math
from dataclasses import dataclass, field, replace

from headway_operator.samples import Sample
from headway_operator.slo import Target
from headway_operator.state import Decision, Observed
from headway_simulator.baselines.knowledge import Known, decision, scaled_to
from headway_simulator.baselines.signals import Seen, gained, see
from headway_simulator.control import Controller
from headway_simulator.step_model import StepModel, idle_ttft_milliseconds


@dataclass(frozen=True, slots=True)
class Interval:
    """target_share: of the ITL target."""

    seconds: float = 180.0
    target_share: float = 1.0


CANDIDATES = (
    Interval(),
    *(Interval(60.0, 0.8), Interval(30.0, 0.65), Interval(30.0), Interval(60.0)),
    *(Interval(60.0, share) for share in (0.9, 0.7, 0.6)),
    *(Interval(30.0, share) for share in (0.8, 0.5)),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """began: what was seen when the interval began. running: sequences that ran, pass by pass, by replica."""

    seen: Seen = field(default_factory=Seen)
    began: Seen | None = None
    began_at: float = 0.0
    running: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Means:
    """Of an interval; times in milliseconds."""

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float
    ttft_milliseconds: float
    itl_milliseconds: float
    running: float


def by_profile(known: Known, parameters: Interval) -> Controller[Memory]:
    """`dynamo-planner`."""

    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        seen = see(memory.seen, sample, observed, now)
        running = sum(one.running for one in seen.replicas.values()) / max(1, len(seen.replicas))
        memory = replace(memory, seen=seen, running=(*memory.running, running))
        replicas = scaled_to(observed)
        if memory.began is None:
            return decision(known, target, replicas, "Begun", now), _begun(memory, now)
        if now - memory.began_at < parameters.seconds:
            return decision(known, target, replicas, "BetweenIntervals", now), memory
        means = _means(memory, now)
        if means is not None:
            limits = target.initial if known.limits is None else known.limits
            itl = target.targets.tpot_milliseconds
            aimed_at = math.inf if itl is None else itl * parameters.target_share
            replicas = math.ceil(
                needed(known.profile, means, aimed_at, limits.max_num_seqs, limits.max_num_batched_tokens)
            )
        return decision(known, target, max(1, replicas), "Planned", now), _begun(memory, now)

    return Controller("dynamo-planner", lambda sample, now: Memory(), decide)


def needed(profile: StepModel, means: Means, itl: float, max_num_seqs: int, max_num_tokens: int) -> float:
    """Replicas, not rounded. itl: the target, milliseconds."""
    context = means.prompt_tokens + means.output_tokens / 2
    expected_ttft = idle_ttft_milliseconds(profile, round(means.prompt_tokens), max_num_tokens)
    prefill_correction = means.ttft_milliseconds / expected_ttft
    prefill = (
        means.requests_per_second
        * means.prompt_tokens
        * min(1.0, prefill_correction)
        / (1000 * means.prompt_tokens / expected_ttft)
    )
    decode_correction = means.itl_milliseconds / _itl(profile, max(1.0, means.running), context)
    aimed_at = itl / decode_correction if decode_correction > 0 else itl
    within = [count for count in range(1, max_num_seqs + 1) if _itl(profile, count, context) <= aimed_at]
    most = max(within, default=1)
    tokens_per_second = 1000 * most / _itl(profile, most, context)
    return prefill + means.requests_per_second * means.output_tokens / tokens_per_second


def _itl(profile: StepModel, running: float, context: float) -> float:
    return 1000 * profile.seconds(0, 0, round(running), round(running * context))


def _begun(memory: Memory, now: float) -> Memory:
    return replace(memory, began=memory.seen, began_at=now, running=())


def _means(memory: Memory, now: float) -> Means | None:
    """None of an interval in which nothing was answered."""
    before, after = memory.began, memory.seen
    assert before is not None

    def counted(name: str) -> float:
        return gained(before, after, lambda one: one.counters[name])

    def answers(name: str) -> float:
        return gained(before, after, lambda one: sum(one.histograms[name].counts))

    def mean(name: str) -> float:
        return gained(before, after, lambda one: one.histograms[name].sum_milliseconds) / answers(name)

    received, finished = counted("received"), counted("finished")
    if min(received, finished, answers("ttft"), answers("tpot")) <= 0:
        return None
    return Means(
        received / (now - memory.began_at),
        # Of those that wait no prompt has been counted yet.
        max(1.0, counted("prompt_tokens") / answers("ttft")),
        counted("generated_tokens") / finished,
        mean("ttft"),
        mean("tpot"),
        sum(memory.running) / len(memory.running),
    )
