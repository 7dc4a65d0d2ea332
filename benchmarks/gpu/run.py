"""The engine on one GPU: right tokens first, then every part against its floor and against its peers.

    PYTHONPATH=runtime python -m benchmarks.gpu.run --out results.json [--stage checks engine peers]

needs torch, triton, transformers, safetensors and numpy only. Every row is printed and written as soon as it
is found, and none is begun that the time (`--seconds`, 540 by default) does not allow, so that a cut loses
nothing. It exits with 1 if a row failed, or a token is further from the best than rounding can explain.
`--smoke` runs all of it on the CPU with tiny shapes, to prove that it works; its numbers mean nothing.
"""

import argparse
import sys
from pathlib import Path

import torch
from benchmarks.gpu.checks import run_checks
from benchmarks.gpu.engine_stage import run_engine
from benchmarks.gpu.machine import Ceilings, ceilings, conditions
from benchmarks.gpu.peers import run_peers
from benchmarks.gpu.report import Report, Row

from headway_runtime.config import Device

STAGES = ("checks", "engine", "peers")


def run(out: Path, stages: list[str], seconds: float, *, is_smoke: bool) -> Report:
    """All rows of the stages named."""
    device: Device = "cpu" if is_smoke else "cuda"
    report = Report(out, conditions(device), seconds)
    found: list[Ceilings] = []

    def measure() -> Row:
        found.append(ceilings(device))
        return {
            "copy_gigabytes_per_second": found[0].bytes_per_second / 1e9,
            "bfloat16_teraflops": found[0].bfloat16_per_second / 1e12,
        }

    report.row("machine", "ceilings", measure)
    if "checks" in stages:
        run_checks(report, device)
    if "engine" in stages and found:
        run_engine(report, device, found[0], is_smoke=is_smoke)
    if "peers" in stages:
        run_peers(report, device, is_smoke=is_smoke)
    if device == "cuda":
        report.found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return report


def main() -> int:
    """0 if every row was measured and right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything (default: 540)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; use --smoke to try the script without one")
    report = run(arguments.out, arguments.stage, arguments.seconds, is_smoke=arguments.smoke)
    where, seconds = report.found["conditions"]["device"], report.found["total_seconds"]
    print(f"{where}: {len(report.rows)} rows, {seconds:.0f} s")
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
