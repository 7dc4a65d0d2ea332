"""Decode attention against float32 over random sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_runtime.kernels.triton import decode_parts
from headway_runtime.kernels.triton.attention_reference import reference_attention
from headway_runtime.kernels.triton.attention_tiles import HeadShape
from headway_runtime.kernels.triton.paged_decode import make_workspace, paged_decode
from headway_runtime.kernels.triton.paged_rows import Scoring, rows_for, used_rows_for

# Of numbers of about one, against a reference of the same inputs: the rounding of weights and of the output.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL_TILES = {
    "keys": 16,
    "programs_per_multiprocessor": 2,
    "least_tiles": 1,
    "most_parts": 16,
    "num_warps": 4,
    "num_stages": 2,
}


def attend_and_compare(case: Any, scoring: Scoring, num_groups: int, chosen: dict[str, int] | None) -> None:
    """What rows belong to somebody is as in the reference; the others are left alone."""
    num_planes, block_size, head_dim = case.numbers.shape[1:]
    shape = HeadShape(num_planes // 2, num_groups, head_dim, block_size)
    workspace = make_workspace(shape, case.which.max_queries, case.which.num_sequences, case.query.device)
    workspace.softmax.fill_(torch.nan)
    workspace.sums.fill_(torch.nan)
    want = reference_attention(case.query, case.numbers, case.scales, case.which, scoring, num_groups)

    paged_decode(
        case.query,
        case.numbers,
        case.scales,
        case.which,
        scoring,
        num_groups,
        workspace,
        case.out,
        chosen,
    )

    end = int(case.which.query_starts[-1])
    tolerance = TOLERANCES[case.query.dtype]
    torch.testing.assert_close(case.out[:end].float(), want[:end], rtol=tolerance, atol=tolerance)
    assert bool(case.out[end:].isnan().all())
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_kv_heads", "num_groups", "head_dim"),
    [(2, 4, 64), (1, 1, 16), (3, 5, 40)],
    ids=["grouped", "one-head", "odd"],
)
def test_sequences_of_all_lengths_attend_to_all_before_them(
    dtype: torch.dtype,
    num_kv_heads: int,
    num_groups: int,
    head_dim: int,
    make_paged_case: Callable[..., Any],
) -> None:
    case = make_paged_case(
        [(1, 1), (1, 16), (1, 17), (1, 150), (1, 33), (0, 0)],
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
        [(1, 70), (2, 5), (1, 16)],
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
        Scoring(0.2, soft_cap=3.0),
        Scoring(0.2, 33, 5.0),
    ],
    ids=["window", "window-of-one", "soft-cap", "both"],
)
def test_windows_and_soft_caps_hold_for_several_tokens_of_a_sequence(
    scoring: Scoring, make_paged_case: Callable[..., Any]
) -> None:
    case = make_paged_case(
        [(8, 90), (1, 40), (3, 3), (0, 0), (5, 21)],
        num_kv_heads=2,
        num_groups=3,
        head_dim=32,
        block_size=8,
        dtype=torch.bfloat16,
    )

    attend_and_compare(case, scoring, 3, SMALL_TILES)


@pytest.mark.parametrize(("least_tiles", "most_parts"), [(1, 16), (2, 16), (100, 16), (1, 2), (1, 1)])
def test_a_pair_may_lie_in_one_stretch_or_in_many(
    least_tiles: int, most_parts: int, make_paged_case: Callable[..., Any]
) -> None:
    case = make_paged_case(
        [(1, 300), (2, 7), (1, 64)],
        num_kv_heads=2,
        num_groups=2,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
    )

    chosen = {**SMALL_TILES, "least_tiles": least_tiles, "most_parts": most_parts}
    attend_and_compare(case, Scoring(0.3), 2, chosen)


@pytest.mark.parametrize(("num_groups", "head_dim"), [(8, 128), (5, 80), (4, 160)], ids=str)
def test_parts_of_many_rows_are_added_up_piece_by_piece(
    num_groups: int, head_dim: int, make_paged_case: Callable[..., Any]
) -> None:
    case = make_paged_case(
        [(8, 150), (1, 40)],
        num_kv_heads=1,
        num_groups=num_groups,
        head_dim=head_dim,
        block_size=16,
        dtype=torch.float32,
    )
    padded_dim = 1 << (head_dim - 1).bit_length()
    used_rows = used_rows_for(8, num_groups)
    assert decode_parts.dims_merged_at_once(used_rows, padded_dim) < head_dim

    attend_and_compare(case, Scoring(0.1), num_groups, SMALL_TILES)


def test_rows_without_any_context_get_zeros(make_paged_case: Callable[..., Any]) -> None:
    case = make_paged_case(
        [(1, 0), (1, 30), (1, 0)],
        num_kv_heads=1,
        num_groups=2,
        head_dim=16,
        block_size=16,
        dtype=torch.bfloat16,
    )

    attend_and_compare(case, Scoring(0.25), 2, SMALL_TILES)
    assert not case.out[0].any()


def test_what_stands_in_blocks_of_others_changes_nothing(make_paged_case: Callable[..., Any]) -> None:
    case = make_paged_case(
        [(1, 37), (1, 5)], num_kv_heads=1, num_groups=2, head_dim=16, block_size=16, dtype=torch.float32
    )
    attend_and_compare(case, Scoring(0.25), 2, SMALL_TILES)
    before = case.out.clone()

    case.numbers.nan_to_num_(nan=7.0)
    attend_and_compare(case, Scoring(0.25), 2, SMALL_TILES)

    assert torch.equal(case.out, before)


def test_rows_are_a_power_of_two_that_products_take() -> None:
    assert rows_for(1, 1) == 16
    assert rows_for(5, 4) == 32
    assert rows_for(8, 8) == 64
    assert rows_for(8, 16) is None
    assert rows_for(1, 71) == 128
