"""Prefill attention against float32 over random chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_runtime.kernels.triton.attention_reference import reference_attention
from headway_runtime.kernels.triton.paged_prefill import paged_prefill
from headway_runtime.kernels.triton.paged_rows import Scoring

# Of numbers of about one, against a reference of the same inputs: the rounding of weights and of the output.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL_TILES = {"rows": 16, "keys": 16, "num_warps": 4, "num_stages": 2}


def attend_and_compare(case: Any, scoring: Scoring, num_groups: int, chosen: dict[str, int] | None) -> None:
    """What rows belong to somebody is as in the reference; the others are left alone."""
    want = reference_attention(case.query, case.numbers, case.scales, case.which, scoring, num_groups)

    paged_prefill(case.query, case.numbers, case.scales, case.which, scoring, num_groups, case.out, chosen)

    end = int(case.which.query_starts[-1])
    tolerance = TOLERANCES[case.query.dtype]
    torch.testing.assert_close(case.out[:end].float(), want[:end], rtol=tolerance, atol=tolerance)
    assert bool(case.out[end:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim"),
    [(2, 4, 64), (1, 1, 16), (2, 5, 40)],
    ids=["grouped", "one-head", "odd"],
)
def test_chunks_of_all_lengths_attend_to_all_before_them(
    dtype: torch.dtype,
    num_kv_heads: int,
    num_groups: int,
    head_dim: int,
    make_paged_case: Callable[..., Any],
) -> None:
    case = make_paged_case(
        [(1, 1), (37, 37), (0, 0), (16, 80), (5, 66), (1, 33)],
        num_kv_heads=num_kv_heads,
        num_groups=num_groups,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        num_free_rows=2,
    )

    attend_and_compare(case, Scoring(head_dim**-0.5), num_groups, None)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_multiplied_by_their_scales(
    kept: torch.dtype, dtype: torch.dtype, make_paged_case: Callable[..., Any]
) -> None:
    case = make_paged_case(
        [(20, 70), (9, 9)],
        num_kv_heads=2,
        num_groups=2,
        head_dim=32,
        block_size=16,
        dtype=dtype,
        kept=kept,
    )

    attend_and_compare(case, Scoring(32**-0.5), 2, SMALL_TILES)


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.2, window=20),
        Scoring(0.2, window=1),
        Scoring(0.2, window=500),
        Scoring(0.2, soft_cap=3.0),
        Scoring(0.2, 33, 5.0),
    ],
    ids=["window", "window-of-one", "window-of-all", "soft-cap", "both"],
)
def test_windows_and_soft_caps_hold(scoring: Scoring, make_paged_case: Callable[..., Any]) -> None:
    case = make_paged_case(
        [(30, 90), (1, 40), (25, 25), (0, 0), (5, 21)],
        num_kv_heads=2,
        num_groups=3,
        head_dim=32,
        block_size=8,
        dtype=torch.bfloat16,
    )

    attend_and_compare(case, scoring, 3, SMALL_TILES)


def test_a_window_leaves_tiles_between_its_edges_unmasked(make_paged_case: Callable[..., Any]) -> None:
    case = make_paged_case(
        [(40, 200)], num_kv_heads=1, num_groups=2, head_dim=16, block_size=16, dtype=torch.float32
    )

    attend_and_compare(case, Scoring(0.3, window=90), 2, SMALL_TILES)


def test_cutting_a_prompt_in_chunks_changes_no_number(make_paged_case: Callable[..., Any]) -> None:
    case = make_paged_case(
        [(64, 64)], num_kv_heads=1, num_groups=2, head_dim=16, block_size=16, dtype=torch.bfloat16
    )
    scoring = Scoring(0.25)
    attend_and_compare(case, scoring, 2, SMALL_TILES)
    whole = case.out.clone()

    for start, end in ((0, 24), (24, 64)):
        which = type(case.which)(
            torch.tensor([0, end - start], dtype=torch.int32, device=whole.device),
            torch.tensor([end], dtype=torch.int32, device=whole.device),
            case.which.tables,
            end - start,
            end - start,
        )
        rows = slice(start, end)
        paged_prefill(case.query[rows], case.numbers, None, which, scoring, 2, case.out[rows], SMALL_TILES)

    assert torch.equal(case.out, whole)
