"""Services that nobody chose: the shipped controller on scenarios drawn by number, beside fixed numbers.

    python -m benchmarks.slo.scenarios --azure FILE --mooncake FILE --servegen FILE

The proof's loads are few, and constants were chosen on them. Here a number stands for a load (by chance, in
bursts, a wave, a part of a recording), a rate, a model, a promise, a cold start and a seed; a case is the
flags of `headway simulate`, printed with `--show`, so that any can be looked at alone. Each is met by
Headway, with its defaults, and by fixed numbers of replicas whose batch limits Headway moves, from what it
had on average down or up to the least that attains the objective: what somebody would buy who knew this load.

It prints a line for each case and, at the end, how many attained and what all cost; with --out the same as
JSON, with --against an earlier one beside it.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.slo.run import TRACES, add_traces

from headway_operator.slo import target_of
from headway_simulator.cluster import Simulation
from headway_simulator.control import headway
from headway_simulator.flags import build_parser
from headway_simulator.measures import Measures, measures
from headway_simulator.options import load_of, setting_of

SECONDS = 1500
GENERATED = ("poisson", "gamma", "gamma", "diurnal")
MODELS = ("llama-3.1-8b-a100-tp2", "llama-2-70b-h100-tp8")
# More replicas than Headway had on average that are tried; fewer are as long as they attain.
MOST_MORE = 6
Files = Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case. fixed: the least number of replicas that attains the objective all the time; None where
    none of those that were tried does."""

    number: int
    percentile: float
    attained: float
    gpu_hours: float
    reversals_per_hour: float
    fixed: int | None
    fixed_gpu_hours: float | None

    @property
    def is_attained(self) -> bool:
        return 100.0 * self.attained >= self.percentile


def flags(number: int, files: Files) -> list[str]:
    """The case of this number, as `headway simulate` takes it. files: by the name of the trace; kinds of
    load whose trace is missing are left out."""
    chance = random.Random(number)
    kinds = [*GENERATED, *(name for name in TRACES for _ in range(1 + (name == "azure")) if name in files)]
    if "azure" not in files:
        kinds = [one for one in kinds if one != "servegen"]
    kind, factor = chance.choice(kinds), chance.choice((1.5, 2, 3, 5))
    # Tight targets need some times as many replicas.
    scale = chance.choice((0.5, 1.0, 2.0)) * (0.5 if factor < 2 else 1.0)
    found = ["--slo-factor", f"{factor:g}", "--percentile", str(chance.choice((90, 95, 99)))]
    found += ["--step-model", chance.choice(MODELS), "--seed", str(chance.randrange(10**6))]
    found += ["--cold-start-seconds", str(chance.choice((30, 60, 60, 120)))]
    return found + _load(kind, scale, chance, files)


def _load(kind: str, scale: float, chance: random.Random, files: Files) -> list[str]:
    lengths = ["--lengths", str(files["azure"])] if "azure" in files else []
    if kind in GENERATED:
        rate = 5.0 * scale * chance.uniform(0.7, 1.5)
        found = ["--generate", kind, "--rate", f"{rate:.2f}", "--duration-seconds", str(SECONDS), *lengths]
        if kind == "gamma":
            found += ["--variation", str(chance.choice((2, 3, 4)))]
        if kind == "diurnal":
            period, factor = chance.choice((600, 1500, 3000)), chance.choice((2, 3, 5))
            found += ["--period-seconds", str(period), "--factor", str(factor)]
        return found
    start = chance.randrange(1_200_000 if kind == "servegen" else 2000)
    found = [
        "--trace",
        str(files[kind]),
        "--start-seconds",
        str(start),
        "--end-seconds",
        str(start + SECONDS),
    ]
    if kind == "servegen":
        return [*found, "--rate", f"{5.0 * scale:g}", *lengths]
    # Of Mooncake's long prompts a fifth as many are as much work.
    return [*found, "--rate-scale", f"{min(1.0, scale) if kind == 'mooncake' else scale:g}"]


def outcome(number: int, files: Files) -> Outcome:
    """Simulate a case, and fixed numbers beside it."""
    case = flags(number, files)
    shipped, percentile = _measured(case), float(case[case.index("--percentile") + 1])

    def fixed(replicas: int) -> Measures | None:
        """What so many cost, where they attain the objective."""
        bounds = ("--min-replicas", str(replicas), "--max-replicas", str(replicas))
        found = _measured([*case, *bounds])
        return found if 100.0 * found.joint_attainment >= percentile else None

    replicas = max(1, round(shipped.mean_replicas))
    best = fixed(replicas)
    while best is not None and replicas > 1 and (fewer := fixed(replicas - 1)) is not None:
        replicas, best = replicas - 1, fewer
    for _ in range(MOST_MORE):
        if best is not None:
            break
        replicas += 1
        best = fixed(replicas)
    return Outcome(
        number,
        percentile,
        shipped.joint_attainment,
        shipped.gpu_hours,
        shipped.reversals_per_hour,
        None if best is None else replicas,
        None if best is None else best.gpu_hours,
    )


def _measured(case: Sequence[str]) -> Measures:
    options = build_parser().parse_args([*case, "--quiet"])
    trace = load_of(options)
    setting = setting_of(options, trace)
    run = Simulation(trace, setting, headway()).result()
    return measures(run, target_of(setting.service.spec), setting.engine.model.gpus)


def line(one: Outcome, before: Outcome | None) -> str:
    """A case in words. before: the same of an earlier run."""
    attained = f"{one.attained:.2%} of {one.percentile:g}"
    fixed = (
        "no fixed number" if one.fixed_gpu_hours is None else f"{one.fixed} fixed: {one.fixed_gpu_hours:.2f}"
    )
    earlier = "" if before is None else f"; before {before.attained:.2%}, {before.gpu_hours:.2f} GPU-hours"
    mark = " " if one.is_attained else "!"
    return (
        f"{one.number:4d} {mark} {attained:>13} for {one.gpu_hours:6.2f} GPU-hours, {fixed}, "
        f"{one.reversals_per_hour:.1f} reversals/h{earlier}"
    )


def summary(found: Sequence[Outcome]) -> str:
    """All cases together. Costs are compared where Headway and a fixed number attain."""
    both = [(one.gpu_hours, one.fixed_gpu_hours) for one in found if one.is_attained and one.fixed_gpu_hours]
    shipped, fixed = (sum(one[index] or 0.0 for one in both) for index in (0, 1))
    ratio = f", {shipped / fixed:.2f} times the least fixed numbers where both attain" if fixed else ""
    return (
        f"attained {sum(one.is_attained for one in found)} of {len(found)}, "
        f"{sum(one.gpu_hours for one in found):.1f} GPU-hours{ratio}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate cases and print them."""
    options = _parser().parse_args(arguments)
    files = {name: path for name in TRACES if (path := getattr(options, name)) is not None}
    numbers = range(options.first, options.first + options.number)
    if options.show:
        for number in numbers:
            print(number, "headway simulate", *flags(number, files))
        return 0
    before: dict[int, Outcome] = {}
    if options.against is not None:
        rows = json.loads(options.against.read_text())["cases"]
        before = {one["number"]: Outcome(**one) for one in rows}
    found = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for one in pool.map(partial(outcome, files=files), numbers):
            found.append(one)
            print(line(one, before.get(one.number)), flush=True)
    print(summary(found))
    if before:
        print("before:", summary([before[one.number] for one in found if one.number in before]))
    if options.out is not None:
        options.out.write_text(json.dumps({"cases": [asdict(one) for one in found]}, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_traces(parser)
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--number", type=int, default=60, help="of cases (default: 60)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write outcomes there")
    parser.add_argument("--against", type=Path, metavar="FILE", help="show those of an earlier --out beside")
    parser.add_argument("--show", action="store_true", help="only print the cases, as flags")
    return parser


if __name__ == "__main__":
    sys.exit(main())
