"""Tries candidates of each kernel and class of shapes, and keeps the fastest; see tune.py."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.gpu.compile_ahead import Helpers, Launch
from benchmarks.gpu.table_file import changed, read_table, write_table
from benchmarks.gpu.tuning_state import Measured, State, Values, key_of

if TYPE_CHECKING:
    from benchmarks.gpu.cases.case import Case, Result

    from headway_runtime.kernels.triton.launch import Gpu

SEED = 7
# Faster by less than that is not worth another entry.
LEAST_GAIN = 0.02
# Between results of two configurations, whose sums are added up in another order.
TOLERANCE = 1e-2
# Of the present entry's time: what takes more at the first shapes is not tried at the others.
HOPELESS = 1.25
CANDIDATE_SECONDS = 10.0
# Bytes of local memory that a thread may have where registers are given up for one program more.
SPILL_BYTES_OF_MAXNREG = 32
# The same of any configuration of a kernel; its file says why.
SPILL_BYTES = {"paged_prefill": 40}
# What an entry says to layers, not to a launch: up to how many rows codes are read, which is looked for after
# all else, and how far `thin_product` goes.
NOT_LAUNCHED = "most_product_rows"
LIMITS = frozenset({NOT_LAUNCHED, "most_rows", "most_megabytes"})

# Rows, with codes, and with plain numbers.
Pair: TypeAlias = "tuple[int, Case, Case]"


@dataclass(frozen=True, slots=True)
class Target:
    """An entry of the table. candidates: the present entry first."""

    kernel: str
    shape_class: str
    cases: tuple["Case", ...]
    candidates: tuple[Values, ...]


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
            values = {**one, **{name: most for name, most in present.items() if name in LIMITS}}
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
    """One run: `with Tuner(...) as tuner: ...`. seconds: for everything.

    What it changes is launched from then on, until it ends.
    """

    def __init__(
        self, gpu: "Gpu", device: str, out: Path, state: State, seconds: float, helpers: Helpers
    ) -> None:
        self._gpu, self._device, self._out, self._state, self._helpers = gpu, device, out, state, helpers
        self._until = time.monotonic() + seconds
        self._in_use = ExitStack()
        self.num_changed = 0

    def __enter__(self) -> "Tuner":
        """With all that the table on disk has, which an earlier run may have changed."""
        for kernel, classes in read_table(self._out).items():
            for shape_class, values in classes.items():
                self._use(kernel, shape_class, values)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_use.close()

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    def tune(self, target: Target) -> bool:
        """False where the time was up before all candidates were tried."""
        label = f"{target.kernel}/{target.shape_class}"
        measured = self._state.of(target.kernel, target.shape_class)
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
            present = measured.get(key_of(target.candidates[0]), {}).get("microseconds", [])
            self._keep(measured, key_of(values), self._measure(target, values, wanted, present))
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
        """Launch that entry from now on, and write the table with it."""
        self._use(kernel, shape_class, values)
        table = read_table(self._out)
        if table.get(kernel, {}).get(shape_class) != values:
            self.num_changed += 1
            write_table(self._out, changed(table, kernel, shape_class, values))

    def _use(self, kernel: str, shape_class: str, values: Values) -> None:
        from headway_runtime.kernels.triton.launch import trying

        self._in_use.enter_context(trying(self._gpu, kernel, shape_class, values))

    def _results(self, target: Target) -> list["Result"]:
        """By the present entry, of the first inputs."""
        from benchmarks.gpu.cases.case import generator_on

        works = [case.make(generator_on(self._device, SEED)) for case in target.cases]
        return [work.shown(work.run()) for work in works]

    def _measure(
        self, target: Target, values: Values, wanted: Sequence["Result"], present: Sequence[float]
    ) -> Measured:
        """present: what the present entry takes; empty where it is what is measured, or fails."""
        from headway_runtime.kernels.triton.launch import trying

        times: list[float] = []
        try:
            with (
                trying(self._gpu, target.kernel, target.shape_class, values),
                spilled_bytes() as spilled,
            ):
                for case, want in zip(target.cases, wanted, strict=True):
                    times.append(self._timed(case, want, values, spilled))
                    before = present[: len(times)] or times
                    ratio = geometric_mean([one / other for one, other in zip(times, before, strict=True)])
                    if ratio > HOPELESS:
                        raise ValueError(f"{case.name}: {ratio:.2f} times the present entry's time so far")
        except Exception as error:  # noqa: BLE001 (compilers and devices refuse in many ways)
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

    def _keep(self, measured: dict[str, Measured], name: str, found: Measured) -> None:
        """A device that an access to foreign memory has stopped computes nothing more in this process; the
        next run shall not try that again."""
        import torch

        measured[name] = found
        self._state.keep()
        if "out" in found and self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def tune_crossover(self, form: str, pairs: Sequence[Pair]) -> bool:
        """From how many rows on plain numbers are faster. False where the time was up before all was
        measured."""
        from headway_runtime.kernels.triton.launch import configuration

        entry = configuration("coded_plain", form, self._gpu)
        measured = self._state.crossover(form, self._entries(form, pairs))
        for rows, codes, plain in pairs:
            if str(rows) in measured:
                continue
            if self.seconds_left < CANDIDATE_SECONDS:
                print(f"coded_plain/{form}: no time left to find {NOT_LAUNCHED}", flush=True)
                return False
            self._keep(measured, str(rows), self._both_ways(codes, plain))
        found = {
            int(rows): (one["microseconds"][0], one["microseconds"][1])
            for rows, one in measured.items()
            if "microseconds" in one
        }
        if not found:
            print(f"coded_plain/{form}: {NOT_LAUNCHED} stays, nothing could be measured", flush=True)
            return True
        most = last_faster(found)
        said = ", ".join(f"{rows}: {one:.0f} and {two:.0f}" for rows, (one, two) in sorted(found.items()))
        print(f"coded_plain/{form}: {NOT_LAUNCHED} {most} (us with codes and plain, {said})", flush=True)
        if most != entry[NOT_LAUNCHED]:
            self.change("coded_plain", form, {**entry, NOT_LAUNCHED: most})
        return True

    def _entries(self, form: str, pairs: Sequence[Pair]) -> dict[str, Values]:
        """All that either way launches, without what is sought."""
        from headway_runtime.kernels.triton.launch import configuration

        names = {("coded_plain", form)}
        names |= {(one.kernel, one.shape_class) for _, one, _ in pairs if one.shape_class is not None}
        found: dict[str, Values] = {}
        for kernel, shape_class in sorted(names):
            values = configuration(kernel, shape_class, self._gpu)
            values.pop(NOT_LAUNCHED, None)
            found[f"{kernel}/{shape_class}"] = values
        return found

    def _both_ways(self, codes: "Case", plain: "Case") -> Measured:
        from benchmarks.gpu.cases.case import generator_on
        from benchmarks.gpu.timing import timed

        try:
            runs = [case.make(generator_on(self._device, SEED)).run for case in (codes, plain)]
            return {"microseconds": [timed([run], self._device).microseconds for run in runs]}
        except Exception as error:  # noqa: BLE001 (of so many rows there may be no room)
            return {"out": f"{type(error).__name__}: {error}"[:300]}


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
