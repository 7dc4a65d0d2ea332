"""Predictions: the page has today's, launches are those that layers make, and times follow their costs."""

from pathlib import Path

import pytest
from benchmarks.gpu import costs, predict
from benchmarks.gpu.cases.timed import FULL, timed_cases
from benchmarks.gpu.costs import Ceilings, Cost, ModelShape, Weights, model_shape
from benchmarks.gpu.predicted_launches import (
    EXPECTED,
    GAP_MICROSECONDS,
    H200,
    Launch,
    decode_attention,
    decode_microseconds,
    layer_launches,
    prompt_microseconds,
    step_launches,
)
from benchmarks.gpu.predicted_rows import timed_kernels
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
LLAMA, QWEN, MIXTURE = (model_shape(one) for one in (LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B))


def test_the_page_has_todays_predictions() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert predict.MARKS.with_section(page, predict.page_section()) == page, (
        "run: PYTHONPATH=runtime python -m benchmarks.gpu.predict --page docs/gpu.md"
    )


def test_a_page_without_a_place_for_them_is_left_alone() -> None:
    with pytest.raises(ValueError, match="add both where the section belongs"):
        predict.MARKS.with_section("# A page\n", "| a table |")


@pytest.mark.parametrize(
    ("weights", "batch", "want"),
    [
        ("none", 1, 8),
        ("none", 64, 8),
        ("none", 65, 9),
        ("int4", 1, 8),
        ("int4", 384, 8),
        ("int4", 385, 13),
        ("fp8", 64, 8),
        ("fp8", 65, 10),
    ],
)
def test_a_layer_is_as_many_launches_as_its_kernels_make(weights: Weights, batch: int, want: int) -> None:
    found = layer_launches(LLAMA, batch, decode_attention(LLAMA, batch, 512), weights)

    assert len(found) == want, [one.name for one in found]
    assert {one.kernel for one in found} <= set(EXPECTED)


def test_a_mixtures_layer_has_five_launches_for_its_experts_and_a_router() -> None:
    found = layer_launches(MIXTURE, 1, decode_attention(MIXTURE, 1, 512))

    assert len(found) == 12
    weights = sum(one.cost.num_bytes for one in found if one.kernel == "expert_product")
    assert weights == pytest.approx(75.5e6, rel=0.01)


@pytest.mark.parametrize(
    ("model", "want"), [(LLAMA, 265), (QWEN, 297), (MIXTURE, 585)], ids=["llama", "qwen3", "mixture"]
)
def test_a_step_is_as_many_launches_as_are_counted_in_a_recording(model: ModelShape, want: int) -> None:
    """By tests/graphs/numbers/test_launches.py, of small models of these shapes."""
    layer = layer_launches(model, 1, decode_attention(model, 1, 512))

    assert model.num_layers * len(layer) + len(step_launches(model, 1)) == want


def test_a_launch_takes_its_gap_and_the_longest_of_three_times() -> None:
    ceilings = Ceilings(1e12, 1e15)
    expected = EXPECTED["cublas"]

    def microseconds(cost: Cost) -> float:
        return Launch("a", "cublas", cost).microseconds(ceilings) - GAP_MICROSECONDS

    assert microseconds(Cost(1.0)) == pytest.approx(expected.least)
    assert microseconds(Cost(1e8)) == pytest.approx(100.0 / expected.of_bytes)
    assert microseconds(Cost(1e8, 1e12)) == pytest.approx(1000.0 / expected.of_operations)


def test_shares_are_below_one() -> None:
    for expected in EXPECTED.values():
        assert 0.0 < expected.of_bytes < 1.0
        assert 0.0 < expected.of_operations <= 1.0


@pytest.mark.parametrize("model", [LLAMA, QWEN, MIXTURE], ids=["llama", "qwen3", "mixture"])
def test_no_prediction_is_below_its_floor(model: ModelShape) -> None:
    for weights in ("none", "fp8", "int4"):
        for batch in (1, 32, 256):
            floor = costs.decode_step(model, batch, 512, weights).floor_seconds(H200)
            assert decode_microseconds(model, batch, 512, weights) > floor * 1e6
        floor = costs.prompt(model, 8192, weights).floor_seconds(H200)
        assert prompt_microseconds(model, 8192, weights) > floor * 1e6


def test_a_faster_gpu_takes_less() -> None:
    faster = Ceilings(8e12, 2e15, 4e15, 4e15)

    assert decode_microseconds(LLAMA, 1, 512, ceilings=faster) < decode_microseconds(LLAMA, 1, 512)


def test_kernels_are_predicted_by_the_names_and_costs_that_they_are_timed_with() -> None:
    timed = {case.name: case.cost for case in timed_cases(FULL)}

    for one in timed_kernels():
        assert one.name in timed
        assert one.cost == timed[one.name], one.name
