"""Which kernels are checked, timed and tuned: all of them, each case by a name of its own."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.candidates import CANDIDATES, candidates_of
from benchmarks.gpu.cases.case import Case, Work, checked, error_of
from benchmarks.gpu.cases.checked import checked_cases
from benchmarks.gpu.cases.timed import FULL, SMOKE, timed_cases
from benchmarks.gpu.costs import Cost
from benchmarks.gpu.table_file import changed, read_table, rendered
from benchmarks.gpu.tuner import LIMITS

from headway_runtime.kernels.triton import launch
from headway_runtime.kernels.triton.launch import DEFAULT, Gpu, configuration, tabled_kernels, trying

H200 = Gpu("nvidia_h200", 90, 132)
# Limits that stand in the tables and are no kernel's.
OTHERS = {"one_shot_all_reduce"}
KERNELS = {kernel for name in launch.CAPABILITIES for kernel in tabled_kernels(name)} - OTHERS
TABLES = Path(launch.__file__).with_name("configurations")


@pytest.mark.parametrize("is_smoke", [False, True])
def test_each_case_has_a_name_of_its_own(is_smoke: bool) -> None:  # noqa: FBT001
    for cases in (timed_cases(SMOKE if is_smoke else FULL), checked_cases(is_smoke=is_smoke)):
        names = Counter(case.name for case in cases)
        assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("is_smoke", [False, True])
def test_every_kernel_of_the_tables_is_checked_and_timed(is_smoke: bool) -> None:  # noqa: FBT001
    timed = {case.kernel for case in timed_cases(SMOKE if is_smoke else FULL)}
    all_checked = {case.kernel for case in checked_cases(is_smoke=is_smoke)}

    assert all_checked >= KERNELS
    # Experts of int8 lie as those of fp8; both are one kernel.
    assert timed >= KERNELS


def test_every_kernel_of_the_tables_has_candidates() -> None:
    assert set(CANDIDATES) == KERNELS


def test_candidates_name_what_the_entries_name() -> None:
    """For each class that is timed, and so can be tuned."""
    seen = set()
    for case in timed_cases(FULL):
        if case.shape_class is None or (case.kernel, case.shape_class) in seen:
            continue
        seen.add((case.kernel, case.shape_class))
        present = configuration(case.kernel, case.shape_class, H200)
        candidates = candidates_of(case.kernel, case.shape_class)
        assert len(candidates) > 1, (case.kernel, case.shape_class)
        for values in candidates:
            launched = set(present) - LIMITS - {"maxnreg"}
            assert set(values) - LIMITS == launched, (case.kernel, case.shape_class)
    # Of products all classes of rows that there are entries for, of attention all types of KV.
    classes = {shape_class for kernel, shape_class in seen if kernel == "coded_product_int4"}
    assert classes == {"rows_1", "rows_8", "rows_16", "rows_32", "rows_64", "rows_many"}
    decodes = ("paged_decode", "paged_decode_wide")
    assert {(one, f"{kv}-d128") for one in decodes for kv in ("16bit", "fp8", "int8")} <= seen


@pytest.mark.parametrize("file", sorted(TABLES.glob("*.json")), ids=lambda file: file.stem)
def test_tables_are_written_as_they_are_committed(file: Path) -> None:
    assert rendered(read_table(file)) == file.read_text(encoding="utf-8")


def test_a_changed_entry_leaves_all_others_in_their_order() -> None:
    table = {"norm": {"default": {"num_warps": 8}}, "draw": {"default": {"num_warps": 4}}}

    found = changed(changed(table, "norm", "4096", {"num_warps": 2}), "gate", "default", {"BLOCK": 512})

    assert found == {
        "norm": {"default": {"num_warps": 8}, "4096": {"num_warps": 2}},
        "draw": {"default": {"num_warps": 4}},
        "gate": {"default": {"BLOCK": 512}},
    }
    assert list(found) == ["norm", "draw", "gate"]
    assert table["norm"] == {"default": {"num_warps": 8}}


def test_what_is_tried_is_launched_and_then_forgotten() -> None:
    before = configuration("norm", "4096", H200)
    with trying(H200, "norm", "4096", {"num_warps": 2}):
        assert configuration("norm", "4096", H200) == {"num_warps": 2}
        with trying(H200, "norm", "4096", {"num_warps": 16}):
            assert configuration("norm", "4096", H200) == {"num_warps": 16}
        assert configuration("norm", "4096", H200) == {"num_warps": 2}
        assert configuration("norm", DEFAULT, H200) == before
    assert configuration("norm", "4096", H200) == before


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.5 / (9 + 20.25) ** 0.5),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0]), float("inf")),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), 0.25),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.zeros(0, 4), torch.zeros(0, 4), 0.0),
        ((torch.ones(2), torch.ones(1)), (torch.ones(2), torch.full((1,), 2.0)), 0.5),
    ],
    ids=["relative", "not a number", "integers", "shape", "empty", "worst of two"],
)
def test_errors_are_told(
    got: torch.Tensor | tuple[torch.Tensor, ...], want: torch.Tensor | tuple[torch.Tensor, ...], error: float
) -> None:
    assert error_of(got, want) == pytest.approx(error)


def test_memory_that_was_not_written_is_noticed() -> None:
    def half_written() -> torch.Tensor:
        out = torch.empty(4)
        out[:2] = 1.0
        return out

    case = Case("half", "none", None, lambda _: Work(half_written, lambda: torch.ones(4)), Cost(1.0))

    assert checked(case, case.make(torch.Generator())) == float("inf")
    assert not torch.are_deterministic_algorithms_enabled()
