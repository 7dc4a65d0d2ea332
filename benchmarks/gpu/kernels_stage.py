"""Stages 1 and 2 of kernels: whether they are right on this device, and how far each is from its floor.

The floor is what must be moved over the measured bandwidth of copies, or what must be computed over the
measured rate of products, whichever is longer (see costs.py). Beside it stands what others take for the same
work, on inputs as they like them. Each timed row is checked first, at the very shape.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from benchmarks.gpu.compile_ahead import CaseList, Helpers, Launch
from benchmarks.gpu.costs import Ceilings
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import num_sets, timed

from headway_runtime.config import Device

if TYPE_CHECKING:
    from benchmarks.gpu.cases.case import Case, Peer

SEED = 20261121
# Of the time there is, at most, that is spent on compiling ahead: of what is launched once, more.
CHECKED_SHARE = 0.5
TIMED_SHARE = 0.25
ROW_SECONDS = 8.0
SCALED_PRODUCT = "scaled_mm"
# Of products that look up the class of their rows; compiling the entries of all classes takes most of it.
LEAST_CLASS = "rows_1"
CLASSES_SECONDS = 40.0


def run_kernel_checks(
    report: Report, device: Device, *, is_smoke: bool, kernels: Collection[str] = ()
) -> None:
    """A row for each kernel: all its checks, and the one that is nearest to its tolerance.

    kernels: of none but these, if any are named.
    """
    from benchmarks.gpu.cases.checked import checked_cases

    cases = _of(kernels, checked_cases(is_smoke=is_smoke), device)
    _compile(report, "checked", "checks", cases, device, CHECKED_SHARE)
    for kernel in dict.fromkeys(case.kernel for case in cases):
        own = [case for case in cases if case.kernel == kernel]
        report.row("checks", f"kernel {kernel}", partial(checked_row, own, device, report.check_time))


def run_kernels(
    report: Report,
    device: Device,
    ceilings: Ceilings,
    *,
    is_smoke: bool,
    kernels: Collection[str] = (),
    has_peers: bool = True,
    compiling_share: float = TIMED_SHARE,
) -> None:
    """A row for each kernel at each shape. has_peers: some compile for long."""
    from benchmarks.gpu.cases.timed import FULL, SMOKE, timed_cases

    cases = _of(kernels, timed_cases(SMOKE if is_smoke else FULL), device)
    _compile(report, "timed", "kernels", cases, device, compiling_share)
    for case in cases:
        measure = partial(_timed_row, case, device, ceilings, has_peers=has_peers)
        report.row("kernels", case.name, measure, needs_seconds=ROW_SECONDS)
        _forget(device)
    if not kernels:
        case = next(case for case in cases if case.shape_class == LEAST_CLASS)
        measure = partial(by_class_row, case, device, ceilings)
        name = f"{case.name}, by default.json's classes"
        report.row("kernels", name, measure, needs_seconds=CLASSES_SECONDS)
        _forget(device)


def _of(kernels: Collection[str], cases: Sequence["Case"], device: Device) -> list["Case"]:
    """Of these kernels, or all, what the device can do."""
    found = [case for case in cases if not kernels or case.kernel in kernels]
    if device == "cuda" or _scales_rows_on_cpu():
        return found
    print(
        f"{SCALED_PRODUCT}: left out, PyTorch {torch.__version__} does none with a scale of each row on a CPU"
    )
    return [case for case in found if case.kernel != SCALED_PRODUCT]


def _scales_rows_on_cpu() -> bool:
    """PyTorch 2.11 does not."""
    rows = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1)
    try:
        torch._scaled_mm(rows, rows.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _compile(
    report: Report, which: CaseList, stage: str, cases: Sequence["Case"], device: Device, share: float
) -> None:
    if device == "cpu":
        return

    def measure() -> Row:
        launches = [Launch(which, case.name) for case in cases]
        with Helpers() as helpers:
            return dict(helpers.compile(launches, share * report.seconds_left))

    report.row(stage, "compiling ahead", measure)


def checked_row(cases: Sequence["Case"], device: Device, check_time: Callable[[], None]) -> Iterator[Row]:
    """After each check. num_left: checks that are still to be done, until there is none.

    worst: the check whose error is nearest to what it may be. wrong: errors, or what was raised.
    """
    from benchmarks.gpu.cases.case import checked, generator_on

    wrong: dict[str, float | str] = {}
    worst, worst_share = "", -1.0
    for number, case in enumerate(cases):
        check_time()
        error: float | None = None
        try:
            error = checked(case, case.make(generator_on(device, SEED + number)))
        except Exception as raised:  # noqa: BLE001 (whatever it is, it is written down)
            wrong[case.name] = f"{type(raised).__name__}: {raised}"[:300]
        if error is not None:
            share = error / max(case.tolerance, 1e-12)
            if error > case.tolerance:
                wrong[case.name] = error
            if share > worst_share:
                worst, worst_share = case.name, share
        _forget(device)
        row: Row = {"num_checks": number + 1, "num_left": len(cases) - number - 1, "is_right": not wrong}
        row |= {"worst": worst, "worst_share_of_tolerance": worst_share}
        yield row | ({"wrong": dict(wrong)} if wrong else {})


def _timed_row(case: "Case", device: Device, ceilings: Ceilings, *, has_peers: bool) -> Row:
    from benchmarks.gpu.cases.case import checked, generator_on

    count = num_sets(case.cost.num_bytes, device)
    works = [case.make(generator_on(device, SEED + number)) for number in range(count)]
    error = checked(case, works[0])
    found = timed([work.run for work in works], device)
    floor = case.cost.floor_seconds(ceilings) * 1e6
    row: Row = {
        "kernel": case.kernel,
        "shape_class": case.shape_class,
        "microseconds": found.microseconds,
        "spread": found.spread,
        "floor_microseconds": floor,
        "share_of_floor": floor / found.microseconds,
        "gigabytes_per_second": case.cost.num_bytes / found.microseconds / 1e3,
        "teraflops": case.cost.operations / found.microseconds / 1e6,
    }
    if not found.is_captured and device == "cuda":
        row["is_captured"] = False
    if error is not None:
        row |= {"error_of_result": error, "is_right": error <= case.tolerance}
    for name in works[0].peers if has_peers else ():
        row |= _peer(name, [work.peers[name] for work in works], found.microseconds, device)
    return row


def by_class_row(case: "Case", device: Device, ceilings: Ceilings) -> Row:
    """A product of one row by every entry that any GPU without a table has for it, whichever table this one
    has: whether entries for few rows pay. microseconds: by that of its own class.

    over_own: of each class, how many times as long; 1 without a measurement where the entries are the same.
    """
    from benchmarks.gpu.cases.case import generator_on

    from headway_runtime.kernels.triton.launch import DEFAULT, entries, gpu_of, trying

    classes = entries(DEFAULT, case.kernel)
    own = classes[LEAST_CLASS]
    count = num_sets(case.cost.num_bytes, device)
    works = [case.make(generator_on(device, SEED + number)) for number in range(count)]
    microseconds: dict[str, float] = {}
    for shape_class, values in classes.items():
        if shape_class == LEAST_CLASS or values != own:
            with trying(gpu_of(torch.device(device)), case.kernel, LEAST_CLASS, values):
                microseconds[shape_class] = timed([work.run for work in works], device).microseconds
    fastest = microseconds[LEAST_CLASS]
    return {
        "kernel": case.kernel,
        "microseconds": fastest,
        "floor_microseconds": case.cost.floor_seconds(ceilings) * 1e6,
        "over_own": {name: microseconds.get(name, fastest) / fastest for name in classes},
    }


def _peer(name: str, peers: Sequence["Peer"], ours: float, device: Device) -> Row:
    """What it takes, and how many times as long as ours; or why there is nothing to say."""
    try:
        theirs = timed([prepare() for prepare in peers], device).microseconds
    except Exception as raised:  # noqa: BLE001 (a peer that cannot do it must not cost us our row)
        return {f"{name}_failed": f"{type(raised).__name__}: {raised}"[:200]}
    return {f"{name}_microseconds": theirs, f"{name}_over_ours": theirs / ours}


def _forget(device: Device) -> None:
    """Inputs of gigabytes, before the next ones are made."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
