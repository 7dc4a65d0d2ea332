"""Makes a GPU's table of configurations anew: tries candidates of each kernel and class, keeps the fastest.

    PYTHONPATH=runtime python -m benchmarks.gpu.tune [--kernel paged_decode ...] [--out TABLE] [--seconds 540]

For each class of shapes, every candidate (candidates.py) is launched at the shapes that are timed of it
(cases/timed.py). One that the compiler or the device refuses, that spills registers, or that computes
anything else than the present entry is out. Of the others the one with the least geometric mean of times is
taken, if it is faster than the present entry by more than noise. For codes it is also found from how many
rows on plain numbers are faster.

All that was found is kept in `--state` as soon as it is: another run goes on where this one was cut. What is
faster is written to the table at once; the others' entries stay. Then compile the table where it will be
committed: `pytest tests/triton_kernels/test_compiled.py`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.compile_ahead import Helpers, Launch
from benchmarks.gpu.table_file import changed, read_table, write_table

if TYPE_CHECKING:
    from benchmarks.gpu.cases.case import Case, Result

    from headway_runtime.kernels.triton.launch import Gpu

SEED = 7
# Faster by less than that is not worth another entry.
LEAST_GAIN = 0.02
# Between results of two configurations, whose sums are added up in another order.
TOLERANCE = 1e-2
CANDIDATE_SECONDS = 10.0
SMOKE_CANDIDATES = 2
# Bytes of local memory that a thread may have where registers are given up for one program more.
SPILL_BYTES_OF_MAXNREG = 32
# The same of any configuration of a kernel; its file says why.
SPILL_BYTES = {"paged_prefill": 40}
# What an entry says to layers, not to a launch.
NOT_LAUNCHED = "most_product_rows"
CROSSOVER_ROWS = (64, 128, 256, 384, 512, 768, 1024, 2048)

Values = Mapping[str, int]
Measured = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """An entry of the table. candidates: the present entry first."""

    kernel: str
    shape_class: str
    cases: tuple["Case", ...]
    candidates: tuple[Values, ...]


@dataclass(slots=True)
class State:
    """All that was measured, by kernel, class and candidate; on disk whenever it changes.

    A candidate has the microseconds of each case, or why it is out.
    """

    file: Path
    conditions: dict[str, Any]
    found: dict[str, dict[str, dict[str, Measured]]] = field(default_factory=dict)

    @classmethod
    def opened(cls, file: Path, conditions: dict[str, Any]) -> "State":
        """What was found under other conditions does not count."""
        if file.is_file():
            told = json.loads(file.read_text(encoding="utf-8"))
            if told["conditions"] == conditions:
                return cls(file, conditions, told["found"])
            print(f"{file}: measured under other conditions, {told['conditions']}; begun anew")
        return cls(file, conditions)

    def of(self, target: Target) -> dict[str, Measured]:
        return self.found.setdefault(target.kernel, {}).setdefault(target.shape_class, {})

    def keep(self) -> None:
        part = self.file.with_suffix(".part")
        text = json.dumps({"conditions": self.conditions, "found": self.found}, indent=1)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.file)


def key_of(values: Values) -> str:
    return json.dumps(dict(sorted(values.items())))


def targets(
    cases: Sequence["Case"], gpu: "Gpu", kernels: Sequence[str], most_candidates: int | None = None
) -> list[Target]:
    """Of all kernels if none are named. ValueError for one that has no candidates."""
    from benchmarks.gpu.candidates import CANDIDATES, candidates_of

    from headway_runtime.kernels.triton.launch import configuration

    unknown = sorted(set(kernels) - set(CANDIDATES))
    if unknown:
        raise ValueError(f"--kernel={unknown[0]!r} has no candidates; use some of {', '.join(CANDIDATES)}")
    entries: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.shape_class is not None and (not kernels or case.kernel in kernels):
            entries.setdefault((case.kernel, case.shape_class), []).append(case)
    found = []
    for (kernel, shape_class), own in entries.items():
        present = configuration(kernel, shape_class, gpu)
        candidates: list[Values] = [present]
        for one in candidates_of(kernel, shape_class):
            values = {**one, NOT_LAUNCHED: present[NOT_LAUNCHED]} if NOT_LAUNCHED in present else dict(one)
            if values not in candidates:
                candidates.append(values)
        if len(candidates) > 1:
            found.append(Target(kernel, shape_class, tuple(own), tuple(candidates[:most_candidates])))
    return found


def best_of(target: Target, measured: Mapping[str, Measured]) -> tuple[Values, float] | None:
    """The fastest candidate, and its gain over the present entry; None where that is less than noise."""
    present = measured.get(key_of(target.candidates[0]), {}).get("microseconds")
    if present is None:
        return None
    best, best_ratio = None, 1.0 - LEAST_GAIN
    for values in target.candidates[1:]:
        times = measured.get(key_of(values), {}).get("microseconds")
        if times is None:
            continue
        ratio = geometric_mean([one / other for one, other in zip(times, present, strict=True)])
        if ratio < best_ratio:
            best, best_ratio = values, ratio
    return None if best is None else (best, 1.0 / best_ratio - 1.0)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(one) for one in ratios) / len(ratios))


class Tuner:
    """One run. seconds: for everything."""

    def __init__(
        self, gpu: "Gpu", device: str, out: Path, state: State, seconds: float, helpers: Helpers
    ) -> None:
        self._gpu, self._device, self._out, self._state, self._helpers = gpu, device, out, state, helpers
        self._until = time.monotonic() + seconds
        self.num_changed = 0

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def tune(self, target: Target) -> bool:
        """False where the time was up before all candidates were tried."""
        label = f"{target.kernel}/{target.shape_class}"
        measured = self._state.of(target)
        left = [values for values in target.candidates if key_of(values) not in measured]
        launches = [Launch("timed", case.name, values) for values in left for case in target.cases]
        if self.seconds_left > 2 * CANDIDATE_SECONDS:
            self._helpers.compile(launches, self.seconds_left / 4)
        wanted: list[Result] = []
        is_whole = True
        for values in left:
            if self.seconds_left < CANDIDATE_SECONDS:
                is_whole = False
                break
            if not wanted:
                wanted = self._results(target)
            measured[key_of(values)] = self._measure(target, values, wanted)
            self._state.keep()
        found = best_of(target, measured)
        tried = f"{len(measured)} of {len(target.candidates)} candidates"
        if found is None:
            print(f"{label}: {tried}, the present entry stays", flush=True)
            return is_whole
        values, gain = found
        self.change(target.kernel, target.shape_class, values)
        print(f"{label}: {tried}, {gain:.1%} faster with {json.dumps(dict(values))}", flush=True)
        return is_whole

    def change(self, kernel: str, shape_class: str, values: Values) -> None:
        """Write the table with that entry."""
        self.num_changed += 1
        write_table(self._out, changed(read_table(self._out), kernel, shape_class, values))

    def _results(self, target: Target) -> list["Result"]:
        """By the present entry, of the first inputs."""
        from benchmarks.gpu.cases.case import generator_on

        works = [case.make(generator_on(self._device, SEED)) for case in target.cases]
        return [work.shown(work.run()) for work in works]

    def _measure(self, target: Target, values: Values, wanted: Sequence["Result"]) -> Measured:
        from headway_runtime.kernels.triton.launch import trying

        try:
            with (
                trying(self._gpu, target.kernel, target.shape_class, values),
                spilled_bytes() as spilled,
            ):
                times = [
                    self._timed(case, want, values, spilled)
                    for case, want in zip(target.cases, wanted, strict=True)
                ]
        except Exception as error:  # noqa: BLE001 (compilers and devices refuse in many ways)
            self._check_device()
            return {"out": f"{type(error).__name__}: {error}"[:300]}
        return {"microseconds": times}

    def _timed(self, case: "Case", want: "Result", values: Values, spilled: Callable[[], int]) -> float:
        from benchmarks.gpu.cases.case import error_of, generator_on
        from benchmarks.gpu.timing import num_sets, timed

        count = num_sets(case.cost.num_bytes, self._device)
        works = [case.make(generator_on(self._device, SEED + number)) for number in range(count)]
        error = error_of(works[0].shown(works[0].run()), want)
        if error > max(TOLERANCE, case.tolerance):
            raise ValueError(f"{case.name}: its result differs by {error:.3g}")
        allowed = max(SPILL_BYTES_OF_MAXNREG if "maxnreg" in values else 0, SPILL_BYTES.get(case.kernel, 0))
        if spilled() > allowed:
            raise ValueError(f"{case.name}: spills {spilled()} bytes a thread, allowed {allowed}")
        return timed([work.run for work in works], self._device).microseconds

    def _check_device(self) -> None:
        """A device that an access to foreign memory has stopped computes nothing more in this process."""
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def tune_crossover(self, form: str, pairs: Sequence[tuple[int, "Case", "Case"]]) -> None:
        """From how many rows on plain numbers are faster. pairs: rows, with codes, and without."""
        from benchmarks.gpu.cases.case import generator_on
        from benchmarks.gpu.timing import timed

        from headway_runtime.kernels.triton.launch import configuration

        entry = configuration("coded_plain", form, self._gpu)
        found: dict[int, tuple[float, float]] = {}
        for rows, codes, plain in pairs:
            if self.seconds_left < CANDIDATE_SECONDS:
                print(f"coded_plain/{form}: no time left to find {NOT_LAUNCHED}")
                return
            runs = [case.make(generator_on(self._device, SEED)).run for case in (codes, plain)]
            first, second = (timed([run], self._device).microseconds for run in runs)
            found[rows] = (first, second)
        most = last_faster(found)
        said = ", ".join(f"{rows}: {one:.0f} and {two:.0f}" for rows, (one, two) in found.items())
        print(f"coded_plain/{form}: {NOT_LAUNCHED} {most} (us with codes and plain, {said})", flush=True)
        if most != entry[NOT_LAUNCHED]:
            # Its block size may have been tuned a moment ago.
            table = read_table(self._out).get("coded_plain", {})
            self.change("coded_plain", form, {**entry, **table.get(form, {}), NOT_LAUNCHED: most})


def last_faster(found: Mapping[int, tuple[float, float]]) -> int:
    """The most rows up to which the first of two ways is faster all along; 0 if it never is."""
    most = 0
    for rows, (first, second) in sorted(found.items()):
        if first >= second:
            break
        most = rows
    return most


@contextmanager
def spilled_bytes() -> Iterator[Callable[[], int]]:
    """Most bytes of local memory that a thread of any kernel launched meanwhile has."""
    from triton.runtime.jit import JITFunction

    most = 0
    run = JITFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        kernel = run(self, *args, **kwargs)
        most = max(most, 4 * int(getattr(kernel, "n_spills", 0) or 0))
        return kernel

    JITFunction.run = recorded
    try:
        yield lambda: most
    finally:
        JITFunction.run = run


def crossovers(form: str, *, is_smoke: bool) -> list[tuple[int, "Case", "Case"]]:
    """A large projection by both ways, at several numbers of rows."""
    from benchmarks.gpu.cases.products import coded_case, many_rows_case
    from benchmarks.gpu.cases.timed import FULL, SMOKE

    shape = (SMOKE if is_smoke else FULL).llama.projections["gate_up"]
    pairs = []
    for rows in (2, 5) if is_smoke else CROSSOVER_ROWS:
        codes = coded_case(f"{form}, {rows}", form, rows, shape)  # type: ignore[arg-type]
        pairs.append((rows, codes, many_rows_case(f"{form}, {rows}", form, rows, shape)))  # type: ignore[arg-type]
    return pairs


def run(arguments: argparse.Namespace) -> int:
    """0 if every candidate of what was asked for is tried."""
    import torch
    from benchmarks.gpu.cases.timed import FORMS, FULL, SMOKE, timed_cases
    from benchmarks.gpu.machine import conditions

    from headway_runtime.kernels.triton import launch

    device = "cpu" if arguments.smoke else "cuda"
    gpu = launch.gpu_of(torch.device(device))
    out = arguments.out or Path(launch.__file__).with_name("configurations") / f"{gpu.name}.json"
    if not out.is_file() and gpu.name in launch.CAPABILITIES:
        write_table(out, read_table(Path(launch.__file__).with_name("configurations") / f"{gpu.name}.json"))
    names = ("device", "torch", "triton", "cuda")
    told = conditions(device)
    state = State.opened(arguments.state, {name: told[name] for name in names})
    cases = timed_cases(SMOKE if arguments.smoke else FULL)
    found = targets(cases, gpu, arguments.kernel, SMOKE_CANDIDATES if arguments.smoke else None)
    if arguments.list:
        for target in found:
            print(f"{target.kernel}/{target.shape_class}: {len(target.candidates)} candidates")
        return 0
    with Helpers(0 if arguments.smoke else None) as helpers:
        tuner = Tuner(gpu, device, out, state, arguments.seconds, helpers)
        is_whole = True
        for target in found:
            is_whole &= tuner.tune(target)
        if not arguments.kernel or "coded_plain" in arguments.kernel:
            for form in FORMS:
                tuner.tune_crossover(form, crossovers(form, is_smoke=arguments.smoke))
    print(f"{tuner.num_changed} entries changed in {out}")
    if gpu.name not in launch.CAPABILITIES and not arguments.smoke:
        print(f"add {gpu.name!r} to CAPABILITIES in {launch.__file__}, so that tests compile its table")
    if not is_whole:
        print("the time was up before all was tried; run it again to go on")
    return 0 if is_whole else 1


def main() -> int:
    """See `run`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kernel", nargs="+", default=[], help="names in the tables (default: all)")
    parser.add_argument("--out", type=Path, help="the table (default: this GPU's, in the package)")
    parser.add_argument("--state", type=Path, default=Path("gpu-tuning.json"), help="what was measured")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything (default: 540)")
    parser.add_argument("--list", action="store_true", help="say what would be tried")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, interpreted on the CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        if arguments.out is None:
            parser.error("--smoke needs --out: what it finds means nothing")
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no CUDA device; use --smoke to try the script without one")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
