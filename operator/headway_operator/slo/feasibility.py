"""Whether any number of replicas of this kind could keep the promise, and what would if none can.

A request that comes to an idle replica sees the least latency that there is: the prompt's own steps, and one
sequence's. Where even that misses a target, more replicas miss it as well; the model's own levers are advice.
"""

from headway_operator.slo.advice import Latency, advice
from headway_operator.slo.evidence import Load
from headway_operator.slo.sizing import Sizing
from headway_operator.slo.target import Target
from headway_operator.state import Attainment


def infeasible(target: Target, found: Sizing | None, load: Load, ttft: Attainment, tpot: Attainment) -> str:
    """Why no number of replicas would do, with advice; "" where one may."""
    if found is not None:
        return _by_model(target, found, ttft, tpot)
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


def _by_model(target: Target, found: Sizing, ttft: Attainment, tpot: Attainment) -> str:
    wanted, idle = target.targets, found.capacity.idle
    if wanted.tpot_milliseconds is not None and idle.tpot > wanted.tpot_milliseconds:
        return _words(target, found, "tpot", "a step with one sequence", wanted.tpot_milliseconds)
    # Evidence to the contrary counts; the lack of any does not: after each replica that gets ready there is
    # none for a while, and another one would be asked for in vain.
    is_kept = ttft.verdict == "met"
    if not is_kept and wanted.ttft_milliseconds is not None and idle.ttft > wanted.ttft_milliseconds:
        return _words(target, found, "ttft", "prefill alone", wanted.ttft_milliseconds)
    return ""


def _words(target: Target, found: Sizing, latency: Latency, what: str, wanted: float) -> str:
    milliseconds = getattr(found.capacity.idle, latency)
    helps = advice(target.build, found.replica, found.capacity.limits, latency, wanted)
    return (
        f"{what} takes {milliseconds:.0f} ms at idle against a target of {wanted:.0f} ms, so "
        f"more replicas would not help: {helps}"
    )
