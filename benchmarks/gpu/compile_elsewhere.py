"""Compiles what the benchmark launches where there is no GPU, so that minutes on one are for measuring.

    TRITON_CACHE_DIR=carried PYTHONPATH=runtime python -m benchmarks.gpu.compile_elsewhere
        [--what timed checked models engines candidates] [--kernel thin_product ...]

on a machine with the very Python, torch and Triton that the GPU's has: Triton looks for what it compiled by
all of its own files. Then carry the folder, and name it in TRITON_CACHE_DIR there; tuning needs no helpers
then (`--helpers 0`). `--strip` deletes of its kernels what only people read, nine tenths.

Kernels are noted on PyTorch's "meta" device (headway_runtime.compiling); a case that looks at its numbers
cannot be noted so, and is compiled when it is launched.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.cases.case import Case
from benchmarks.gpu.cases.checked import checked_cases
from benchmarks.gpu.cases.timed import FULL as SIZES
from benchmarks.gpu.cases.timed import timed_cases
from benchmarks.gpu.checks import DTYPES, MODELS, model_config, small_engine
from benchmarks.gpu.engine_plan import FULL
from benchmarks.gpu.engine_stage import FORMS, engine_options
from benchmarks.gpu.engines import engine_config
from benchmarks.gpu.tuner import targets

from headway_runtime.compiling.imagined_steps import launch_steps
from headway_runtime.compiling.noted_launches import NotedLaunch, compile_launch, noted_launches, target_of
from headway_runtime.config import EngineConfig
from headway_runtime.kernels.triton.launch import Gpu, trying
from headway_runtime.parallel.share import Share

WHAT = ("timed", "checked", "models", "engines", "candidates")
# Of what Triton keeps of a kernel: what a launch reads.
LAUNCHED = (".cubin", ".json")


class MetaGenerator(torch.Generator):
    """Random numbers of tensors that hold none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


def note(gpu: Gpu, what: str, kernels: Sequence[str]) -> tuple[list[NotedLaunch], list[str]]:
    """What is to be compiled, and cases that could not be noted. kernels: of none but these; all if empty."""
    missed: list[str] = []

    def run(cases: Iterable[Case]) -> None:
        for case in cases:
            if kernels and case.kernel not in kernels:
                continue
            try:
                case.make(MetaGenerator()).run()
            except RuntimeError as error:
                # What looks at numbers that are not there: PyTorch says so of "meta" tensors.
                if "meta tensor" not in str(error):
                    raise
                missed.append(case.name)

    def run_candidates() -> None:
        for target in targets(timed_cases(SIZES), gpu, kernels):
            for values in target.candidates:
                with trying(gpu, target.kernel, target.shape_class, values):
                    run(target.cases)

    works: dict[str, Callable[[], None]] = {
        "timed": lambda: run(timed_cases(SIZES)),
        "checked": lambda: run(checked_cases(is_smoke=False)),
        "candidates": run_candidates,
        "models": lambda: _run_engines(_models()),
        "engines": lambda: _run_engines(_engines()),
    }
    return noted_launches(gpu, works[what]), missed


def _run_engines(configs: Iterable[EngineConfig]) -> None:
    for config in configs:
        launch_steps(config, Share(0, 1))


def _models() -> Iterator[EngineConfig]:
    """Those whose tokens are checked."""
    for shape, family in MODELS.values():
        for dtype in DTYPES:
            told = model_config(shape, family).to_dict()
            told |= {"architectures": [f"{family}ForCausalLM"], "dtype": dtype}
            with _folder(told) as folder:
                yield engine_config(Path(folder), "cuda", **small_engine(dtype))


def _engines() -> Iterator[EngineConfig]:
    """Those that are timed."""
    longest = max(*FULL.prompts, FULL.context + FULL.steps) + 64
    wanted = [(FULL.llama, form, longest) for form in FORMS]
    wanted += [(FULL.qwen, "none", sum(FULL.load[1:]) + 64), (FULL.mixture, "none", longest)]
    for shape, form, length in wanted:
        with _folder(shape) as folder:
            yield engine_config(Path(folder), "cuda", **engine_options(FULL, "cuda", length, form))


def _folder(config: Any) -> "tempfile.TemporaryDirectory[str]":
    """With a model's config.json."""
    found = tempfile.TemporaryDirectory()
    Path(found.name, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


_noted: Sequence[NotedLaunch] = ()


def compile_all(launches: Sequence[NotedLaunch], gpu: Gpu, num_processes: int) -> list[str]:
    """Into Triton's folder. What the compiler refused, and why."""
    global _noted
    _noted = sorted(launches, key=lambda one: -one.num_characters)
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        return [found for found in pool.imap_unordered(_Compile(gpu), range(len(_noted))) if found]


class _Compile:
    def __init__(self, gpu: Gpu) -> None:
        self._target = target_of(gpu)

    def __call__(self, number: int) -> str:
        try:
            compile_launch(_noted[number], self._target)
        except Exception as error:  # noqa: BLE001 (candidates are refused in many ways)
            return f"{_noted[number].name}: {type(error).__name__}: {error}"[:200]
        return ""


def strip(folder: Path) -> int:
    """Leaves what a launch reads in the folders of Triton's kernels; returns their bytes."""
    kept = 0
    for own in {group.parent for group in folder.glob("*/__grp__*.json")}:
        for file in own.iterdir():
            if file.suffix in LAUNCHED:
                kept += file.stat().st_size
            else:
                file.unlink()
    return kept


def main() -> None:
    """Refused kernels are told, and are no failure: candidates may be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--kernel", nargs="+", default=[], help="of cases and candidates (default: all)")
    parser.add_argument("--gpu", default="nvidia_h200", help="its table's name")
    parser.add_argument("--capability", type=int, default=90, help="90 for 9.0")
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--strip", action="store_true", help="delete what a launch does not read")
    arguments = parser.parse_args()
    folder = os.environ.get("TRITON_CACHE_DIR")
    if folder is None:
        parser.error("TRITON_CACHE_DIR names no folder; set it to the one to carry")
    gpu = Gpu(arguments.gpu, arguments.capability, arguments.multiprocessors)
    for what in arguments.what:
        launches, missed = note(gpu, what, arguments.kernel)
        refused = compile_all(launches, gpu, arguments.processes)
        print(f"{what}: {len(launches) - len(refused)} kernels")
        for name in missed:
            print(f"{what}: not noted, compiled when it is launched: {name}")
        for problem in refused:
            print(f"{what}: refused: {problem}")
    if arguments.strip:
        print(f"{folder}: {strip(Path(folder)) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
