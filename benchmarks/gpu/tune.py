"""Makes a GPU's table of configurations anew: tries candidates of each kernel and class, keeps the fastest.

    PYTHONPATH=runtime python -m benchmarks.gpu.tune [--kernel paged_decode ...] [--out TABLE] [--seconds 540]

For each class of shapes, every candidate (candidates.py) is launched at the shapes that are timed of it
(cases/timed.py). One that the compiler or the device refuses, that spills registers, or that computes
anything else than the present entry is out. Of the others the one with the least geometric mean of times is
taken, if it is faster than the present entry by more than noise. For codes it is also found from how many
rows on plain numbers are faster, with the block sizes that were found.

All that was found is kept in `--state` as soon as it is: another run goes on where this one was cut. What is
faster is written to the table at once; the others' entries stay. Then compile the table where it will be
committed: `pytest tests/triton_kernels/test_compiled.py`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.compile_ahead import Helpers
from benchmarks.gpu.fast_interpreter import hasten
from benchmarks.gpu.interpreted import interpret
from benchmarks.gpu.table_file import read_table, write_table
from benchmarks.gpu.tuner import Pair, Tuner, targets
from benchmarks.gpu.tuning_state import State

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.launch import Gpu

SMOKE_CANDIDATES = 2
CROSSOVER_ROWS = (64, 128, 256, 384, 512, 768, 1024, 2048)


def crossovers(form: str, *, is_smoke: bool) -> list[Pair]:
    """A large projection by both ways, at several numbers of rows."""
    from benchmarks.gpu.cases.products import coded_case, many_rows_case
    from benchmarks.gpu.cases.timed import FULL, SMOKE

    shape = (SMOKE if is_smoke else FULL).llama.projections["gate_up"]
    pairs = []
    for rows in (2, 5) if is_smoke else CROSSOVER_ROWS:
        codes = coded_case(f"{form}, {rows}", form, rows, shape)  # type: ignore[arg-type]
        pairs.append((rows, codes, many_rows_case(f"{form}, {rows}", form, rows, shape)))  # type: ignore[arg-type]
    return pairs


def tune_kernels(
    kernels: Sequence[str],
    out: Path | None,
    state: Path,
    until: float,
    *,
    is_smoke: bool,
    num_helpers: int | None = None,
) -> bool:
    """Whether every candidate of these kernels is tried, and each crossover of theirs found; all if none are
    named.

    out: None for this GPU's table in the package. until: of `time.monotonic`. num_helpers: processes that
    compile ahead; None: as many as there are cores for.
    """
    import torch
    from benchmarks.gpu.cases.timed import FORMS, FULL, SMOKE, timed_cases
    from benchmarks.gpu.machine import conditions

    from headway_runtime.kernels.triton import launch

    device = "cpu" if is_smoke else "cuda"
    gpu = launch.gpu_of(torch.device(device))
    table = _table_file(gpu, out)
    told = conditions(device)
    kept = State.opened(state, {name: told[name] for name in ("device", "torch", "triton", "cuda")})
    cases = timed_cases(SMOKE if is_smoke else FULL)
    is_whole = True
    with (
        Helpers(0 if is_smoke else num_helpers) as helpers,
        Tuner(gpu, device, table, kept, until - time.monotonic(), helpers) as tuner,
    ):
        for target in targets(cases, gpu, kernels, SMOKE_CANDIDATES if is_smoke else None):
            is_whole &= tuner.tune(target)
        if not kernels or "coded_plain" in kernels:
            for form in FORMS:
                is_whole &= tuner.tune_crossover(form, crossovers(form, is_smoke=is_smoke))
    print(f"{tuner.num_changed} entries changed in {table}")
    if gpu.name not in launch.CAPABILITIES and not is_smoke:
        print(f"add {gpu.name!r} to CAPABILITIES in {launch.__file__}, so that tests compile its table")
    if not is_whole:
        print("the time was up before all was tried; run it again to go on")
    return is_whole


def _table_file(gpu: "Gpu", out: Path | None) -> Path:
    """Where the table is to be written; begun with the package's own."""
    from headway_runtime.kernels.triton import launch

    own = Path(launch.__file__).with_name("configurations") / f"{gpu.name}.json"
    if out is not None and not out.is_file() and own.is_file():
        write_table(out, read_table(own))
    return out or own


def say_targets(kernels: Sequence[str], *, is_smoke: bool) -> None:
    """What would be tried."""
    import torch
    from benchmarks.gpu.cases.timed import FULL, SMOKE, timed_cases

    from headway_runtime.kernels.triton.launch import gpu_of

    gpu = gpu_of(torch.device("cpu" if is_smoke else "cuda"))
    cases = timed_cases(SMOKE if is_smoke else FULL)
    for target in targets(cases, gpu, kernels, SMOKE_CANDIDATES if is_smoke else None):
        print(f"{target.kernel}/{target.shape_class}: {len(target.candidates)} candidates")


def main() -> int:
    """0 if every candidate of what was asked for is tried."""
    began_at = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kernel", nargs="+", default=[], help="names in the tables (default: all)")
    parser.add_argument("--out", type=Path, help="the table (default: this GPU's, in the package)")
    parser.add_argument("--state", type=Path, default=Path("gpu-tuning.json"), help="what was measured")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything (default: 540)")
    parser.add_argument(
        "--helpers", type=int, help="processes that compile ahead; 0 where Triton's folder has all already"
    )
    parser.add_argument("--list", action="store_true", help="say what would be tried")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, interpreted on the CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        interpret()
        hasten()
        if arguments.out is None:
            parser.error("--smoke needs --out: what it finds means nothing")
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no CUDA device; use --smoke to try the script without one")
    if arguments.list:
        say_targets(arguments.kernel, is_smoke=arguments.smoke)
        return 0
    until = began_at + arguments.seconds
    is_whole = tune_kernels(
        arguments.kernel,
        arguments.out,
        arguments.state,
        until,
        is_smoke=arguments.smoke,
        num_helpers=arguments.helpers,
    )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
