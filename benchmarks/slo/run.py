"""Headway's controller against other autoscalers' and against knowing everything: `make bench-slo`.

Prints what it is going to do and how long that should take, does it in as many processes as there are
cores, and writes
results.md, results.json and a picture for each load. What is finished is kept, in results.jsonl: a run that
was stopped goes on, and one after a change does again only what the change could alter. A load whose trace is
not given is left out, and the tables say so.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.slo import another_draw, carry, page, pictures, store, told, work
from benchmarks.slo.loads import ALL_LOADS, LOADS, LONG_ONLY
from benchmarks.slo.plan import Plan, Task, long, quick, simulated_seconds, tasks
from benchmarks.slo.work import Row

FOLDER = Path(__file__).parent
# Processor time of a simulated second of a load, about, measured on a virtual core of an AMD EPYC with other
# work beside it.
SECONDS_PER_SIMULATED_SECOND = {
    "azure": 0.040,
    "mooncake": 0.014,
    "servegen": 0.048,
    "own-step": 0.005,
    "own-wave": 0.005,
    "step": 0.030,
    "diurnal": 0.044,
    "flash": 0.042,
}
# Tables and pictures of what is finished are written about so often, so that a run may be cut off at any
# time.
PAGE_SECONDS = 300.0
TRACES = ("azure", "mooncake", "servegen")
KINDS = ("headway", "oracle", "told", "draw", "long", "baseline")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, resume, or with --report only write the tables of what is there."""
    options = _parser().parse_args(arguments)
    files = {name: path for name in TRACES if (path := getattr(options, name)) is not None}
    for name, path in files.items():
        if not path.is_file():
            print(
                f"--{name}={str(path)!r} is no file; give the trace, or leave the flag out", file=sys.stderr
            )
            return 2
    names = tuple(
        name
        for name, load in LOADS.items()
        if set(load.files) <= files.keys() and (options.long or name not in LONG_ONLY)
    )
    kinds = tuple(options.only or KINDS)
    plan = quick(names[:2]) if options.quick else long(names) if options.long else Plan(names)
    if options.carry is not None and (options.report or options.only):
        print("--carry simulates samples of all kinds: leave --report and --only out", file=sys.stderr)
        return 2
    try:
        run(plan, files, options.out, options.jobs, () if options.report else kinds, options.carry)
        if options.prune:
            _prune(plan, files, options.out / "results.jsonl")
    except carry.CarryError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_traces(parser)
    parser.add_argument("--quick", action="store_true", help="two loads, one promise, some five minutes")
    parser.add_argument(
        "--long", action="store_true", help="nothing cut: whole halves, all candidates (a day)"
    )
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="simulations at a time; default: the cores there are",
    )
    parser.add_argument(
        "--only",
        choices=KINDS,
        action="append",
        help="do only tasks of this kind, of those that are left; may be given again",
    )
    parser.add_argument("--report", action="store_true", help="simulate nothing, write the tables again")
    parser.add_argument(
        "--carry",
        metavar="REVISION",
        help="take over what the code of this revision found, if some of it, simulated again, is the same",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="at last, forget what other versions of the code, or other plans, found",
    )
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser


def add_traces(parser: argparse.ArgumentParser) -> None:
    """A flag for each published trace."""
    for name in TRACES:
        parser.add_argument(
            f"--{name}",
            type=Path,
            metavar="FILE",
            default=_from_environment(name),
            help=f"published trace (docs/simulate.md says where); default: $HEADWAY_TRACE_{name.upper()}",
        )


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of at least 1; leave it out to use all cores"
        )
    return int(text)


def _from_environment(name: str) -> Path | None:
    path = os.environ.get(f"HEADWAY_TRACE_{name.upper()}")
    return Path(path) if path else None


def run(
    plan: Plan,
    files: Mapping[str, Path],
    folder: Path,
    num_processes: int,
    kinds: Sequence[str] = KINDS,
    revision: str | None = None,
) -> None:
    """Do what is not done yet of these kinds of tasks, and write tables and pictures of all that is.

    revision: of the code whose results are carried over first (`carry`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "results.jsonl"
    if revision is not None:
        _carry(plan, files, lines, num_processes, revision)
    fingerprints = store.Fingerprints(plan, files)
    known = store.read(lines)
    keys = {task: fingerprints.of(task) for task in tasks(plan)}
    wanted = [task for task, key in keys.items() if key not in known and task.kind in kinds]
    told_at = time.monotonic()
    _print_plan(plan, wanted, sum(key in known for key in keys.values()), num_processes)
    for task, rows in _worked_off(plan, wanted, files, num_processes):
        known[keys[task]] = rows
        store.add(lines, keys[task], rows)
        if time.monotonic() - told_at > PAGE_SECONDS:
            told_at = _write(plan, keys, known, folder)
    _write(plan, keys, known, folder)


def _carry(plan: Plan, files: Mapping[str, Path], lines: Path, num_processes: int, revision: str) -> None:
    def simulate(samples: Sequence[Task]) -> Iterator[tuple[Task, list[Row]]]:
        print(f"{len(samples)} tasks to see whether the code of {revision} finds the same", flush=True)
        return _worked_off(plan, samples, files, num_processes)

    print(f"{len(carry.over(plan, files, lines, revision, simulate))} tasks carried over", flush=True)


def _prune(plan: Plan, files: Mapping[str, Path], lines: Path) -> None:
    fingerprints = store.Fingerprints(plan, files)
    count = store.prune(lines, {fingerprints.of(task) for task in tasks(plan)})
    print(f"{count} results of other code, or of another plan, are forgotten")


def _write(plan: Plan, keys: Mapping[Task, str], known: Mapping[str, list[Row]], folder: Path) -> float:
    """Tables and pictures of what is known; returns when."""
    found = [row for key in keys.values() for row in known.get(key, [])]
    unfinished = [task for task, key in keys.items() if key not in known]
    page.write(plan, found, folder, unfinished)
    pictures.draw(found, folder)
    return time.monotonic()


def _worked_off(
    plan: Plan, wanted: Sequence[Task], files: Mapping[str, Path], num_processes: int
) -> Iterator[tuple[Task, list[Row]]]:
    """Each task with its rows as it is finished, begun in the order given."""
    began = time.monotonic()
    for count, (task, rows) in enumerate(_finished(plan, wanted, files, num_processes), start=1):
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:5.1f} min  {count}/{len(wanted)}  {task.words}: {_shown(rows)}", flush=True)
        yield task, rows


def _finished(
    plan: Plan, wanted: Sequence[Task], files: Mapping[str, Path], num_processes: int
) -> Iterator[tuple[Task, list[Row]]]:
    if num_processes == 1:
        yield from ((task, _done(plan, task, files)) for task in wanted)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        running = {pool.submit(_done, plan, task, files): task for task in wanted}
        yield from ((running[future], future.result()) for future in as_completed(running))


def _done(plan: Plan, task: Task, files: Mapping[str, Path]) -> list[Row]:
    kinds = {"told": told.done, "draw": another_draw.done}
    # A row says where it was found, since a run that was stopped may go on elsewhere.
    return [
        {**row, "machine": page.machine_words()} for row in kinds.get(task.kind, work.done)(plan, task, files)
    ]


def _shown(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row['slo_factor']:g}x P{row['percentile']} {row['measures']['joint_attainment']:.2%} "
        f"{row['measures']['gpu_hours']:.2f} GPU-hours"
        for row in rows
    )


def _print_plan(plan: Plan, wanted: Sequence[Task], num_done: int, num_processes: int) -> None:
    """What is to be done, and how long it should take on as many idle cores."""
    print(f"loads: {', '.join(plan.loads)}; {len(wanted)} tasks to do, {num_done} done before")
    left_out = [name for name in ALL_LOADS if name not in plan.loads]
    if left_out:
        print(
            "left out, for want of traces or fitted step times, or in a run that is not --long: "
            f"{', '.join(left_out)}"
        )
    minutes: dict[str, float] = {}
    count: Counter[str] = Counter()
    for task in wanted:
        kind = "headway with faults" if task.kind == "headway" and task.name else task.kind
        each = SECONDS_PER_SIMULATED_SECOND[task.load] * plan.rate_scale
        seconds = simulated_seconds(plan, task) * each / num_processes
        minutes[kind] = minutes.get(kind, 0.0) + seconds / 60
        count[kind] += 1
    for kind, predicted in minutes.items():
        print(f"  {kind}: {count[kind]} tasks, about {predicted:.0f} minutes")
    print(f"  in all about {sum(minutes.values()):.0f} minutes in {num_processes} processes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
