"""Whether entries for few rows pay is measured by a row of its own."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.gpu import kernels_stage
from benchmarks.gpu.cases.timed import FULL, timed_cases
from benchmarks.gpu.costs import Ceilings
from benchmarks.gpu.kernels_stage import LEAST_CLASS, by_class_row

from headway_runtime.kernels.triton import launch
from headway_runtime.kernels.triton.launch import DEFAULT, Gpu, configuration, entries
from headway_runtime.kernels.triton.row_products import class_of_rows

H200 = Gpu("nvidia_h200", 90, 132)
ENTRIES = {
    "rows_1": {"block_rows": 8},
    "rows_8": {"block_rows": 8},
    "rows_16": {"block_rows": 16},
    "default": {"block_rows": 64},
}


def test_each_entry_of_any_gpu_is_timed_once_whichever_table_this_one_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case: Any = SimpleNamespace(
        kernel="coded_product_int4",
        cost=SimpleNamespace(num_bytes=1, floor_seconds=lambda _: 3e-6),
        make=lambda _: SimpleNamespace(run=lambda: None),
    )
    timed: list[int] = []

    def time(calls: Sequence[Callable[[], object]], device: str) -> SimpleNamespace:
        timed.append(configuration(case.kernel, class_of_rows(1), H200)["block_rows"])
        return SimpleNamespace(microseconds=4.0 + timed[-1])

    monkeypatch.setattr(kernels_stage, "timed", time)
    monkeypatch.setattr(launch, "gpu_of", lambda _: H200)
    monkeypatch.setattr(launch, "entries", lambda *_: ENTRIES)
    before = configuration(case.kernel, LEAST_CLASS, H200)

    row = by_class_row(case, "cpu", Ceilings(1.0, 1.0))

    assert timed == [8, 16, 64]
    assert row["over_own"] == {"rows_1": 1, "rows_8": 1, "rows_16": 20 / 12, "default": 68 / 12}
    assert (row["microseconds"], row["floor_microseconds"]) == (12, pytest.approx(3))
    assert configuration(case.kernel, LEAST_CLASS, H200) == before


def test_there_is_a_product_of_one_row_with_such_entries() -> None:
    case = next(case for case in timed_cases(FULL) if case.shape_class == LEAST_CLASS)

    assert {"rows_1", "rows_8", "rows_16", "rows_32", DEFAULT} <= set(entries(DEFAULT, case.kernel))
