"""The engine on one GPU: right first, then every part against its floor and against its peers.

    PYTHONPATH=runtime python -m benchmarks.gpu.run --out results.json [--stage checks kernels engine peers]

needs torch, triton, transformers, safetensors and numpy only; what needs fastapi or pydantic (the server)
is left out. Every row is printed and written as soon as it is found, and none is begun that the time
(`--seconds`, 540 by default, enough for one stage) does not allow, so that a cut loses nothing; other stages
that the JSON has stay in it. It exits with 1 if a row failed, if anything is further from what is right than
rounding can explain, or if nothing was measured.
`--stage first` is what is worth most of all stages (see first.py).
`--smoke` runs all of it on the CPU with tiny shapes, kernels in Triton's interpreter and decode steps
recorded as tests record them, to prove that it works; its numbers mean nothing.

Stages import what they need when they are run: Triton decides whether it interprets when it is imported.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.interpreted import interpret, stand_in
from benchmarks.gpu.report import MACHINE

if TYPE_CHECKING:
    from benchmarks.gpu.costs import Ceilings
    from benchmarks.gpu.report import Report, Row

    from headway_runtime.config import Device

STAGES = ("checks", "kernels", "engine", "peers")
FIRST = "first"


def run(out: Path, stages: list[str], until: float, *, is_smoke: bool) -> "Report":
    """All rows of the stages named. until: of `time.monotonic`."""
    import torch
    from benchmarks.gpu.machine import ceilings, conditions, works
    from benchmarks.gpu.report import DeviceLost, Report

    if is_smoke:
        stand_in()
    device: Device = "cpu" if is_smoke else "cuda"
    report = Report(out, conditions(device), until - time.monotonic(), works=lambda: works(device))
    found: list[Ceilings] = []

    def measure() -> "Row":
        found.append(ceilings(device))
        operations = {
            "bfloat16_teraflops": found[0].bfloat16_per_second,
            "float8_teraflops": found[0].float8_per_second,
            "int8_teraops": found[0].int8_per_second,
        }
        return {"copy_gigabytes_per_second": found[0].bytes_per_second / 1e9} | {
            name: rate / 1e12 for name, rate in operations.items() if rate is not None
        }

    report.run["ceilings"] = report.row(MACHINE, "ceilings", measure)
    if not found:
        return report
    for stage in stages:
        try:
            _run_stage(stage, report, device, found[0], out, is_smoke=is_smoke)
        except DeviceLost as lost:
            print(f"{lost}: what is left is not measured; run it again for the other stages")
            report.run["lost"] = str(lost)
            report.write()
            return report
        except Exception as error:  # noqa: BLE001 (the other stages are measured all the same)
            traceback.print_exc()
            report.fail(stage, error)
        report.finish(stage)
    if device == "cuda":
        say_goals(report)
        report.run["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        report.write()
    return report


def _run_stage(
    stage: str, report: "Report", device: "Device", found: "Ceilings", out: Path, *, is_smoke: bool
) -> None:
    match stage:
        case "first":
            from benchmarks.gpu.first import run_first

            run_first(report, device, found, out, is_smoke=is_smoke)
        case "checks":
            from benchmarks.gpu.checks import ALL_SECONDS, run_checks
            from benchmarks.gpu.engine_checks import run_engine_checks
            from benchmarks.gpu.kernels_stage import run_kernel_checks

            with report.within(report.seconds_left - ALL_SECONDS):
                run_kernel_checks(report, device, is_smoke=is_smoke)
            run_checks(report, device, is_smoke=is_smoke)
            run_engine_checks(report, device, is_smoke=is_smoke)
        case "kernels":
            from benchmarks.gpu.kernels_stage import run_kernels

            run_kernels(report, device, found, is_smoke=is_smoke)
        case "engine":
            from benchmarks.gpu.engine_stage import run_engine

            run_engine(report, device, found, is_smoke=is_smoke)
        case "peers":
            from benchmarks.gpu.peers import run_peers

            run_peers(report, device, is_smoke=is_smoke)


def say_goals(report: "Report") -> None:
    """Of all rows that the file has, whichever run they are of; each goal says which."""
    from benchmarks.gpu.goals import judged

    report.goals = []
    dates = {run["number"]: run["date"] for run in report.runs}
    for goal in judged(report.rows):
        said = "reached" if goal.is_reached else "not reached"
        sources = [
            {"stage": stage, "run": number}
            for stage, number in dict.fromkeys((row["stage"], row["run"]) for row in goal.rows)
        ]
        source = ", ".join(f"{one['stage']} of {dates[one['run']]}" for one in sources)
        print(f"goal | {goal.name} | {goal.found:.4g}, goal {goal.wanted:g}: {said} ({source})")
        report.goals.append(
            {
                "name": goal.name,
                "found": goal.found,
                "wanted": goal.wanted,
                "is_reached": goal.is_reached,
                "from": sources,
            }
        )
    report.write()


def main() -> int:
    """0 if rows were measured, and all are right; a goal that is not reached is no fault."""
    began_at = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write, or to add to")
    parser.add_argument("--stage", nargs="+", choices=[*STAGES, FIRST], default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything (default: 540)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        interpret()
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no CUDA device; use --smoke to try the script without one")
    until = began_at + arguments.seconds
    report = run(arguments.out, arguments.stage, until, is_smoke=arguments.smoke)
    where, seconds = report.run["conditions"]["device"], report.run["total_seconds"]
    print(f"{where}: {report.num_measured} rows, {seconds:.0f} s")
    if not report.num_measured:
        print(f"nothing was measured: --seconds={arguments.seconds:g} may be too few, 540 are enough")
    return 0 if report.is_right and report.num_measured else 1


if __name__ == "__main__":
    sys.exit(main())
