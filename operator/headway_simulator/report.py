"""What a simulation says: as JSON, and in a few lines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from headway_operator.slo import Target
from headway_simulator.cluster import Setting
from headway_simulator.context_limit import Fitted
from headway_simulator.measures import Measures, reversals
from headway_simulator.oracle import Oracle
from headway_simulator.records import Pass
from headway_simulator.timeline import Minute
from headway_simulator.trace import Trace
from headway_simulator.unsimulated import Unsimulated

REPORT_VERSION = 1


def judged_targets(target: Target) -> dict[str, float | None]:
    """Those that the simulated engine judges by."""
    names = ("ttft_milliseconds", "tpot_milliseconds")
    return {name: getattr(target.targets, name) for name in names}


def as_json(
    controller: str,
    trace: Trace,
    fit: Fitted,
    setting: Setting,
    target: Target,
    found: Measures,
    oracle: Oracle | None,
    untold: Unsimulated,
    minutes: Sequence[Minute],
    passes: Sequence[Pass],
    seconds_taken: Mapping[str, float],
) -> dict[str, Any]:
    """The report, version 1; docs/simulate.md says what each field means. trace: as it came; fit: what
    engines got of it."""
    has_oracle = oracle is not None and oracle.is_attained
    return {
        "version": REPORT_VERSION,
        "controller": controller,
        "objective": target.percentile / 100,
        "targets": judged_targets(target),
        **asdict(found),
        "token_budget_reversals_per_hour": 3600 * budget_reversals(passes) / trace.duration_seconds,
        **context_counts(fit),
        "oracle_gpu_hours": oracle.measures.gpu_hours if oracle is not None and has_oracle else None,
        "cost_over_oracle": (
            found.gpu_hours / oracle.measures.gpu_hours if oracle is not None and has_oracle else None
        ),
        "oracle": None if oracle is None else asdict(oracle),
        "trace": {
            "name": trace.name,
            "duration_seconds": trace.duration_seconds,
            "requests_per_second": trace.requests_per_second,
        },
        "step_model": asdict(setting.engine.model),
        "speculation": None if setting.engine.speculation is None else asdict(setting.engine.speculation),
        "conditions": asdict(setting.conditions),
        "not_simulated": list(untold.passed_over),
        "told_by_step_model": list(untold.told_by_step_model),
        "scaling": {"min_replicas": target.min_replicas, "max_replicas": target.max_replicas},
        "causes": dict(Counter(one.cause for one in passes)),
        "timeline": [asdict(one) for one in minutes],
        "seconds_taken": dict(seconds_taken),
    }


def budget_reversals(passes: Sequence[Pass]) -> int:
    """How often the token budget moved against the direction of the time before."""
    budgets = [one.limits.max_num_batched_tokens for one in passes]
    return reversals(after - before for before, after in pairwise(budgets))


def context_counts(fit: Fitted) -> dict[str, int | None]:
    """What the replicas' context made of the load."""
    return {
        "max_model_len": fit.max_model_len,
        "num_too_long": len(fit.refused),
        "num_cut_short": fit.num_cut,
    }


def text(
    controller: str,
    trace: Trace,
    fit: Fitted,
    setting: Setting,
    target: Target,
    found: Measures,
    oracle: Oracle | None,
    untold: Unsimulated,
) -> str:
    """The same for a person."""
    model, guesses = setting.engine.model, setting.engine.speculation
    plural, guessing = "s" if model.gpus > 1 else "", ""
    if guesses is not None:
        number, share = guesses.num_speculative_tokens, guesses.acceptance
        guessing = f"; up to {number} guesses, each true with probability {share:g} (--acceptance)"
    targets = target.targets
    load = f"{found.num_arrivals} requests in {trace.duration_seconds:.0f} s"
    latencies = (
        ("TTFT", found.ttft_milliseconds, targets.ttft_milliseconds),
        ("TPOT", found.tpot_milliseconds, targets.tpot_milliseconds),
    )
    shown = (f"{name} {_milliseconds(got)} against {_milliseconds(want)}" for name, got, want in latencies)
    worst = f"{_share(found.worst_five_minutes)} in the worst 5 minutes"
    ends = f"rejected {found.num_rejected}, lost {found.num_lost}, unfinished {found.num_unfinished}"
    replicas = f"{found.mean_replicas:.2f} replicas on average, {found.most_replicas} at most"
    lines = [
        f"{controller} on {trace.name}: {load} ({trace.requests_per_second:.2f}/s)",
        f"a replica's steps as {model.name!r} has them, on {model.gpus} GPU{plural}{guessing}",
        *unsimulated_lines(untold.passed_over, untold.told_by_step_model),
        f"P{target.percentile} {', '.join(shown)}{_of_answered(found)}",
        f"attained by {found.joint_attainment:.2%} of arrivals, {worst}; {ends}",
        *context_lines(fit, target),
        f"{found.gpu_hours:.2f} GPU-hours, {replicas}",
        f"{found.actions_per_hour:.1f} actions and {found.reversals_per_hour:.1f} reversals an hour",
    ]
    if found.recovery_seconds is not None:
        lines.append(f"recovered {found.recovery_seconds:.0f} s after the jump")
    if oracle is not None:
        lines.append(_oracle_line(found, oracle, has_refused=bool(fit.refused)))
    return "\n".join(lines)


def context_lines(fit: Fitted, target: Target) -> list[str]:
    """What the replicas' context makes of the load, and of the promise."""
    told = [str(fit)] if str(fit) else []
    num_arrivals = len(fit.refused) + len(fit.trace.arrivals)
    if 100 * len(fit.refused) > (100 - target.percentile) * num_arrivals:
        told.append(
            f"these alone are more than the {100 - target.percentile}% that may miss: nothing attains the "
            "objective but a larger model.maxModelLen"
        )
    return told


def _of_answered(found: Measures) -> str:
    """Of whom the percentiles are, where not of all."""
    is_some_missing = found.num_rejected + found.num_lost + found.num_unfinished > 0
    return ", of those that were answered" if is_some_missing else ""


def unsimulated_lines(passed: Sequence[str], by_step_model: Sequence[str] = ()) -> list[str]:
    """What of a manifest does not count here."""
    lines = [f"not simulated: {', '.join(passed)} of the manifest"] if passed else []
    if by_step_model:
        lines.append(f"as --step-model has it, not the manifest: {', '.join(by_step_model)}")
    return lines


def _oracle_line(found: Measures, oracle: Oracle, *, has_refused: bool) -> str:
    cost, of_whom = oracle.measures, " of those that fit the context" if has_refused else ""
    if not oracle.is_attained:
        return f"oracle: no schedule attains the objective; the best has {cost.joint_attainment:.2%}{of_whom}"
    return (
        f"oracle: {cost.gpu_hours:.2f} GPU-hours at {cost.joint_attainment:.2%}{of_whom}; "
        f"this is {found.gpu_hours / cost.gpu_hours:.2f} times that"
    )


def _milliseconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} ms"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2%}"
