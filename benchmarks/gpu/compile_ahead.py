"""Has kernels compiled by many processes at once, before one process times them.

Compiling takes seconds a kernel and one core; a GPU may be there for minutes, with many cores beside it. Each
helper makes a case's inputs and launches it once, so that what the compiler made lies in Triton's cache on
disk, from where everyone else loads it. Helpers are idle while anything is timed, and gone in the end.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.pool import Pool
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from benchmarks.gpu.cases.case import Case

MOST_HELPERS = 12
CaseList: TypeAlias = Literal["timed", "checked"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One case of a list; values: instead of the table's, for the case's kernel and class."""

    cases: CaseList
    name: str
    values: Mapping[str, int] | None = None


class Helpers:
    """Processes that compile. `with Helpers() as helpers: helpers.compile(...)`."""

    def __init__(self, count: int | None = None) -> None:
        """count: of processes; 0: nothing is compiled ahead."""
        cores = os.cpu_count() or 1
        self._count = max(0, min(MOST_HELPERS, cores - 1)) if count is None else count
        self._pool: Pool | None = None

    def __enter__(self) -> "Helpers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def compile(self, launches: Sequence[Launch], seconds: float) -> dict[str, float]:
        """Returns after so many seconds at the latest. How many were launched, failed, and left undone.

        What fails here fails again where it is measured, and is told there.
        """
        if not self._count or not launches:
            return {"launched": 0, "failed": 0, "left": len(launches)}
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(self._count)
        until = time.monotonic() + seconds
        found = self._pool.imap_unordered(launch_once, launches)
        counts = {True: 0, False: 0}
        for _ in launches:
            try:
                counts[found.next(timeout=max(0.0, until - time.monotonic()))] += 1
            except multiprocessing.TimeoutError:
                # Whoever is still at it would disturb what is timed.
                self._pool.terminate()
                self._pool.join()
                self._pool = None
                break
        return {
            "launched": counts[True],
            "failed": counts[False],
            "left": len(launches) - sum(counts.values()),
        }


def launch_once(launch: Launch) -> bool:
    """In a helper: whether it ran."""
    import torch
    from benchmarks.gpu.cases.case import generator_on

    from headway_runtime.kernels.triton.launch import gpu_of, trying

    case = _cases(launch.cases)[launch.name]
    device = torch.device("cuda")
    try:
        if launch.values is None or case.shape_class is None:
            case.make(generator_on("cuda", 0)).run()
        else:
            with trying(gpu_of(device), case.kernel, case.shape_class, launch.values):
                case.make(generator_on("cuda", 0)).run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:  # noqa: BLE001 (whatever it is, whoever measures it meets it again)
        return False
    return True


@cache
def _cases(which: CaseList) -> dict[str, "Case"]:
    """By name."""
    from benchmarks.gpu.cases.checked import checked_cases
    from benchmarks.gpu.cases.timed import FULL, timed_cases

    found = timed_cases(FULL) if which == "timed" else checked_cases(is_smoke=False)
    return {case.name: case for case in found}
