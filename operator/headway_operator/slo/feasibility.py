"""Whether any number of replicas of this kind could keep the promise, and what would if none can.

A request that comes to an idle replica sees the least latency that there is: the prompt's own steps, and one
sequence's. Where even that misses a target, more replicas miss it as well; the model's own levers are advice.

What an idle replica takes for a mean prompt follows from the step model alone, and where that misses, nobody
has to wait for evidence. What it takes for the percentile's prompt hangs on how prompts are spread, of which
only two moments are known; so that is believed only of replicas that are nearly idle and miss, and not where
requests come in groups that wait for themselves. Nothing is believed that what was measured, on whatever
load, contradicts.
"""

from dataclasses import replace

from headway_operator.slo.advice import Latency, advice
from headway_operator.slo.evidence import Load
from headway_operator.slo.forecast import Forecast
from headway_operator.slo.predictions import Factors
from headway_operator.slo.sizing import NEARLY_IDLE, Sizing, idle_latencies, with_even_prompts
from headway_operator.slo.target import Target
from headway_operator.state import Attainment

# Where so many of its own group are before a request, on average, it shows nothing of an idle replica.
MOST_BEFORE = 0.5


def infeasible(
    target: Target,
    found: Sizing | None,
    load: Load,
    ahead: Forecast,
    ready: int,
    ttft: Attainment,
    tpot: Attainment,
) -> str:
    """Why no number of replicas would do, with advice; "" where one may. ready: how many there are."""
    if found is not None:
        return _by_model(target, found, ahead.now / max(1, ready), ttft, tpot)
    is_missed = ttft.verdict == "violated" and (load.late > 0 or load.ttft_missed > 0)
    is_tpot_missed = tpot.verdict == "violated" and load.tpot_missed > 0
    is_queued = load.late > 0 or load.queue_milliseconds > load.prefill_milliseconds
    is_idle = load.running <= load.num_sampled
    if (
        ttft.target_milliseconds is not None
        and is_missed
        and not is_tpot_missed
        and not is_queued
        and is_idle
    ):
        return "even an idle replica misses this target, so more would not help"
    return ""


def _by_model(target: Target, found: Sizing, per_second: float, ttft: Attainment, tpot: Attainment) -> str:
    """per_second: requests of one replica."""
    wanted, idle = target.targets, idle_latencies(target, found.replica, found.factors)
    if _is_step_too_long(wanted.tpot_milliseconds, found, idle.tpot, tpot):
        return _words(target, found, "tpot", idle.tpot, "a step with one sequence")
    if wanted.ttft_milliseconds is None or ttft.verdict == "met" or idle.ttft <= wanted.ttft_milliseconds:
        return ""
    # For want of evidence the mean prompt is taken at its word: after each replica that gets ready there is
    # none for a while, and another one would be asked for in vain.
    even = with_even_prompts(found.replica)
    is_sure = idle_latencies(target, even, Factors()).ttft > wanted.ttft_milliseconds
    is_idle = per_second <= NEARLY_IDLE * found.replica.most_per_second
    is_shown = ttft.verdict == "violated" and is_idle and found.replica.before < MOST_BEFORE
    if (is_sure or is_shown) and not _is_contradicted(idle.ttft, ttft):
        return _words(target, found, "ttft", idle.ttft, "prefill alone")
    return ""


def _is_step_too_long(wanted: float | None, found: Sizing, milliseconds: float, measured: Attainment) -> bool:
    """Whether a token takes too long beside nothing else. Steps that check guesses tell the model nothing,
    and make several tokens: where less was measured than steps take, that is what counts."""
    if wanted is None or min(1.0, found.factors.tpot) * milliseconds <= wanted:
        return False
    return measured.verdict != "met" and not _is_contradicted(milliseconds, measured)


def _is_contradicted(milliseconds: float, measured: Attainment) -> bool:
    """Whether the percentile was lower on replicas that had more to do."""
    return measured.p_milliseconds is not None and measured.p_milliseconds < milliseconds


def _words(target: Target, found: Sizing, latency: Latency, milliseconds: float, what: str) -> str:
    wanted = getattr(target.targets, f"{latency}_milliseconds")
    limits = target.bound_limits(target.highest)
    lone = replace(found.replica, percent=float(target.percentile))
    factor = milliseconds / getattr(lone.idle(limits), latency)
    helps = advice(target.build, lone, limits, latency, wanted, factor)
    return (
        f"{what} takes {milliseconds:.0f} ms at idle against a target of {wanted:.0f} ms, so "
        f"more replicas would not help: {helps}"
    )
