"""Stages 1 and 2 of kernels: whether they are right on this device, and how far each is from its floor.

The floor is what must be moved over the measured bandwidth of copies, or what must be computed over the
measured rate of products, whichever is longer (see costs.py). Beside it stands what others take for the same
work, on inputs as they like them. Each timed row is checked first, at the very shape.
"""

import gc
from collections.abc import Sequence
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
# Of all the time, at most, that is spent on compiling ahead.
COMPILING_SHARE = 0.25
ROW_SECONDS = 8.0


def run_kernel_checks(report: Report, device: Device, *, is_smoke: bool) -> None:
    """A row for each kernel: all its checks, and the one that is nearest to its tolerance."""
    from benchmarks.gpu.cases.checked import checked_cases

    cases = checked_cases(is_smoke=is_smoke)
    _compile(report, "checked", "checks", cases, device)
    for kernel in dict.fromkeys(case.kernel for case in cases):
        own = [case for case in cases if case.kernel == kernel]
        report.row("checks", f"kernel {kernel}", partial(_checked_row, own, device))


def run_kernels(report: Report, device: Device, ceilings: Ceilings, *, is_smoke: bool) -> None:
    """A row for each kernel at each shape."""
    from benchmarks.gpu.cases.timed import FULL, SMOKE, timed_cases

    cases = timed_cases(SMOKE if is_smoke else FULL)
    _compile(report, "timed", "kernels", cases, device)
    for case in cases:
        measure = partial(_timed_row, case, device, ceilings)
        report.row("kernels", case.name, measure, needs_seconds=ROW_SECONDS)
        _forget(device)


def _compile(report: Report, which: CaseList, stage: str, cases: Sequence["Case"], device: Device) -> None:
    if device == "cpu":
        return

    def measure() -> Row:
        launches = [Launch(which, case.name) for case in cases]
        with Helpers() as helpers:
            return dict(helpers.compile(launches, COMPILING_SHARE * report.seconds_left))

    report.row(stage, "compiling ahead", measure)


def _checked_row(cases: Sequence["Case"], device: Device) -> Row:
    """worst: the check whose error is nearest to what it may be. wrong: errors, or what was raised."""
    from benchmarks.gpu.cases.case import checked, generator_on

    wrong: dict[str, float | str] = {}
    worst, worst_share = "", -1.0
    for number, case in enumerate(cases):
        try:
            error = checked(case, case.make(generator_on(device, SEED + number)))
        except Exception as raised:  # noqa: BLE001 (whatever it is, it is written down)
            wrong[case.name] = f"{type(raised).__name__}: {raised}"[:300]
            continue
        if error is None:
            continue
        share = error / max(case.tolerance, 1e-12)
        if error > case.tolerance:
            wrong[case.name] = error
        if share > worst_share:
            worst, worst_share = case.name, share
        _forget(device)
    row: Row = {"num_checks": len(cases), "is_right": not wrong, "worst": worst}
    row["worst_share_of_tolerance"] = worst_share
    return row | ({"wrong": wrong} if wrong else {})


def _timed_row(case: "Case", device: Device, ceilings: Ceilings) -> Row:
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
    for name in works[0].peers:
        row |= _peer(name, [work.peers[name] for work in works], found.microseconds, device)
    return row


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
