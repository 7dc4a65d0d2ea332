"""How Headway meets one case of the plan, decision by decision: where its replicas and its misses come from.

    python -m benchmarks.slo.course --load azure --promise "1.5x P99" --azure FILE

Each line is of STEP_SECONDS: what came (requests/s, from the arrivals themselves), the last decision's view
of it (level, ahead, dispersion, groups, how much of a rise is believed), a replica (predicted, trusted,
kappa, the measured factors of TTFT and TPOT), replicas (called for, wanted, ready, pending), who is late, how
many of those that came missed which target, and the cause. Times are from the beginning of what is judged;
what lies before it warms up.
"""

import argparse
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.slo import another_draw
from benchmarks.slo.loads import LOADS, Halves
from benchmarks.slo.plan import FAULTS, Plan, Promise, Task
from benchmarks.slo.run import TRACES, add_traces
from benchmarks.slo.work import Excerpt, excerpts

from headway_operator.samples import Sample
from headway_operator.slo import Memory, Target, target_of
from headway_operator.state import Decision, Observed
from headway_simulator.cluster import BEGIN_SECONDS, Simulation
from headway_simulator.control import Controller, headway
from headway_simulator.records import Flight, Run

STEP_SECONDS = 10.0
INPUTS = (
    ("level", "requests_per_second", "8.2f"),
    ("ahead", "expected_per_second", "8.2f"),
    ("idc", "index_of_dispersion", "5.1f"),
    ("grp", "index_of_groups", "5.1f"),
    ("lasts", "rate_persistence", "6.2f"),
    ("told", "capacity_per_second", "7.2f"),
    ("trust", "trusted_per_second", "7.2f"),
    ("kappa", "kappa", "6.2f"),
    ("f.ttft", "ttft_factor", "7.2f"),
    ("f.tpot", "tpot_factor", "7.2f"),
    ("call", "recommended_replicas", "5.0f"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the case and print it."""
    options = _parser().parse_args(arguments)
    files = {name: path for name in TRACES if (path := getattr(options, name)) is not None}
    missing = sorted(set(LOADS[options.load].files) - files.keys())
    if missing:
        print(f"--load {options.load} needs --{missing[0]} FILE", file=sys.stderr)
        return 2
    plan = Plan((options.load,))
    plan = another_draw.drawn(plan) if options.another_draw else plan
    task = Task("long" if options.over_time else "headway", options.load, options.fault, options.promise)
    for line in course(plan, task, files):
        print(line)
    return 0


def course(plan: Plan, task: Task, files: Mapping[str, Path]) -> list[str]:
    """Headway through the excerpt of this task, as a table."""
    plan = plan.of_task(task)
    (excerpt,) = excerpts(plan, task, Halves(task.load, files, plan))
    decisions: list[Decision] = []
    run = Simulation(excerpt.trace, excerpt.setting, _noting(decisions)).result()
    return list(_lines(excerpt, run, decisions))


def _lines(excerpt: Excerpt, run: Run, decisions: Sequence[Decision]) -> Iterator[str]:
    target = target_of(excerpt.setting.service.spec)
    began, asked = BEGIN_SECONDS + excerpt.warm_up_seconds, target.targets
    yield (
        f"targets: TTFT {asked.ttft_milliseconds:g} ms, TPOT {asked.tpot_milliseconds:g} ms, "
        f"P{target.percentile:g}"
    )
    heads = [f"{name:>{_width(form)}}" for name, _, form in INPUTS]
    yield f"   time    came{''.join(heads)} want ready pend late  ttft  tpot seqs tokens cause"
    flights = sorted(run.flights, key=lambda one: one.arrived_at)
    times = [one.arrived_at for one in flights]
    at = BEGIN_SECONDS
    for decision in decisions:
        if decision.at < at + STEP_SECONDS:
            continue
        these = flights[bisect_left(times, at) : bisect_left(times, decision.at)]
        known = decision.evidence
        numbers = [
            f"{known[key]:{form}}" if key in known else f"{'-':>{_width(form)}}" for _, key, form in INPUTS
        ]
        ttft, tpot = _missed(these, target)
        yield (
            f"{decision.at - began:7.0f}{len(these) / (decision.at - at):8.2f}{''.join(numbers)}"
            f"{decision.replicas:5d}{known['ready']:6.0f}{known['pending']:5.0f}{known['late']:5.0f}{ttft:6d}{tpot:6d}"
            f"{decision.limits.max_num_seqs:5d}{decision.limits.max_num_batched_tokens:7d} "
            f"{decision.cause} {decision.blocker}".rstrip()
        )
        at = decision.at
    judged = excerpt.judged(run, target)
    yield f"attained {judged.joint_attainment:.2%} for {judged.gpu_hours:.2f} GPU-hours"


def _width(form: str) -> int:
    return int(form.partition(".")[0])


def _missed(flights: Sequence[Flight], target: Target) -> tuple[int, int]:
    """How many missed the first token's target, and how many the other's."""
    ttft = sum(
        not replace(one, tpot_seconds=None).meets(target.targets.ttft_milliseconds, None) for one in flights
    )
    return ttft, sum(not one.meets(None, target.targets.tpot_milliseconds) for one in flights)


def _noting(decisions: list[Decision]) -> Controller[Memory]:
    """Headway, and what it decided."""
    shipped = headway()

    def decide(
        target: Target, memory: Memory, sample: Sample, observed: Observed, now: float
    ) -> tuple[Decision, Memory]:
        decision, after = shipped.decide(target, memory, sample, observed, now)
        decisions.append(decision)
        return decision, after

    return Controller(shipped.name, shipped.begin, decide)


def _promise(text: str) -> Promise:
    """As the tables write one: "1.5x P99"."""
    factor, _, percentile = text.partition("x P")
    try:
        return float(factor), int(percentile)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no promise; write, for example, "1.5x P99"') from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_traces(parser)
    parser.add_argument("--load", choices=sorted(LOADS), required=True)
    parser.add_argument("--promise", type=_promise, default=(3.0, 95), help='default: "3x P95"')
    parser.add_argument("--fault", choices=[one.name for one in FAULTS], default="", help="default: none")
    parser.add_argument("--another-draw", action="store_true", help="with the seed nothing was chosen by")
    parser.add_argument("--over-time", action="store_true", help="half an hour or an hour of it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
