"""Kernels of a mixture of experts: the choice, the order, the products and the sum are those of torch."""

import pytest
import torch
from torch import Tensor

from headway_runtime.kernels.triton import expert_product as expert_products
from headway_runtime.kernels.triton.coded_rows import coded_rows
from headway_runtime.kernels.triton.coded_weight import CodedWeight, coded_weight
from headway_runtime.kernels.triton.expert_inputs import (
    coded_inputs,
    coded_reference,
    ordered_inputs,
    ordered_reference,
)
from headway_runtime.kernels.triton.expert_order import (
    NO_EXPERT,
    choice_reference,
    choose_experts,
    expert_order,
    most_tiles,
    order_reference,
)
from headway_runtime.kernels.triton.expert_product import ExpertWeights, expert_product, product_reference
from headway_runtime.kernels.triton.expert_rows_product import (
    ExpertRowWeights,
    expert_rows_product,
    row_tile_rows,
    rows_product_reference,
)
from headway_runtime.kernels.triton.expert_sum import expert_sum, sum_reference
from headway_runtime.kernels.triton.gate import gate_by_torch
from headway_runtime.model_config import Activation


def random_choice(rows: int, num_experts: int, num_used: int, generator: torch.Generator) -> Tensor:
    scores = torch.rand(rows, num_experts, generator=generator, device=generator.device)
    return scores.argsort(-1)[:, :num_used].to(torch.int32)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("num_experts", "num_used"), [(8, 2), (5, 3), (60, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_most_probable_experts_are_chosen(
    num_experts: int, num_used: int, dtype: torch.dtype, generator: torch.Generator, *, normalizes: bool
) -> None:
    # All different, also in bfloat16.
    logits = torch.stack(
        [torch.randperm(num_experts, generator=generator, device=generator.device) for _ in range(7)]
    )
    logits = (logits / 8 - 2).to(dtype)
    got = choose_experts(logits, num_used, normalizes=normalizes)
    want = choice_reference(logits, num_used, normalizes=normalizes)

    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("num_experts", [5, 8], ids=["padded", "not padded"])
def test_a_row_that_is_no_numbers_chooses_experts_there_are(
    num_experts: int, generator: torch.Generator, *, normalizes: bool
) -> None:
    """Its weights are NaN, as its results are to be; what the others choose is their own."""
    logits = torch.randn(6, num_experts, device=generator.device, generator=generator)
    want = choice_reference(logits, 2, normalizes=normalizes)
    broken, whole = [1, 2, 4], [0, 3, 5]
    logits[1, 3] = torch.nan
    logits[2, 0] = torch.inf
    logits[4] = -torch.inf

    weights, chosen = choose_experts(logits, 2, normalizes=normalizes)

    assert weights[broken].isnan().all()
    assert (chosen[broken] >= 0).all()
    assert (chosen[broken] < num_experts).all()
    assert torch.equal(chosen[whole], want[1][whole])
    torch.testing.assert_close(weights[whole], want[0][whole], rtol=1e-5, atol=1e-7)

    x = torch.randn(6, 32, device=generator.device, generator=generator)
    orders = torch.stack([torch.randperm(32, device=generator.device) for _ in range(num_experts)])
    assert torch.equal(
        ordered_inputs(x, chosen, orders, slots_per_row=2), ordered_reference(x, chosen, orders)
    )
    assert torch.equal(expert_order(chosen, num_experts, 16).order, order_reference(chosen))


def test_of_equals_the_first_is_chosen(device: torch.device) -> None:
    weights, chosen = choose_experts(torch.zeros(2, 6, device=device), 3, normalizes=True)

    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, device=device))


@pytest.mark.parametrize(
    ("rows", "num_experts", "num_used"), [(1, 8, 2), (37, 5, 3), (300, 40, 8), (9, 3, 1)]
)
@pytest.mark.parametrize("tile_rows", [8, 16])
def test_rows_are_ordered_by_expert_and_every_slot_is_in_one_tile(
    rows: int, num_experts: int, num_used: int, tile_rows: int, generator: torch.Generator
) -> None:
    chosen = random_choice(rows, num_experts, num_used, generator)
    if rows == 9:
        chosen[:] = 1
    got = expert_order(chosen, num_experts, tile_rows)

    assert torch.equal(got.order, order_reference(chosen))
    assert got.tiles.shape[1] == most_tiles(chosen.numel(), num_experts, tile_rows)
    flat, seen = chosen.flatten().tolist(), []
    is_over = False
    for expert, first, end in got.tiles.t().tolist():
        is_over = is_over or expert == NO_EXPERT
        if is_over:
            assert expert == NO_EXPERT
            continue
        own = got.order[first : min(first + tile_rows, end)].tolist()
        assert own
        assert {flat[slot] for slot in own} == {expert}
        seen += own
    assert sorted(seen) == list(range(len(flat)))


def test_results_are_added_up_by_weight(generator: torch.Generator) -> None:
    results = torch.randn(5 * 3, 200, generator=generator, device=generator.device).bfloat16()
    weights = torch.rand(5, 3, generator=generator, device=generator.device)

    torch.testing.assert_close(
        expert_sum(results, weights).float(), sum_reference(results, weights), rtol=2**-8, atol=1e-5
    )


def plain_weights(weight: Tensor) -> ExpertWeights:
    num_experts, num_outputs, num_inputs = weight.shape
    return ExpertWeights(num_experts, num_outputs, num_inputs, weight, None)


def coded_weights(
    form: str, shape: tuple[int, int, int], generator: torch.Generator
) -> tuple[ExpertWeights, Tensor]:
    """And what they stand for."""
    experts, outputs, inputs = shape
    coded, wants = [], []
    for _ in range(experts):
        scales = (
            torch.rand(outputs, inputs // 64, generator=generator, device=generator.device).half().float()
        )
        if form == "fp8 groups":
            codes = torch.randn(outputs, inputs, generator=generator, device=generator.device).to(
                torch.float8_e4m3fn
            )
            coded.append(coded_weight("fp8", [codes], [scales[::24]], scale_rows=24))
            wants.append(codes.float() * scales[::24].repeat_interleave(24, 0).repeat_interleave(64, 1) / 8)
        elif form == "int4":
            numbers = torch.randint(0, 16, (outputs, inputs), generator=generator, device=generator.device)
            codes = (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8)
            coded.append(coded_weight("int4", [codes], [scales]))
            wants.append((numbers.float() - 8) * scales.repeat_interleave(64, 1) / 8)
        else:
            numbers = torch.randn(outputs, inputs, generator=generator, device=generator.device)
            codes = numbers.to(torch.float8_e4m3fn)
            coded.append(coded_weight("fp8", [codes], [scales[:, :1]]))
            wants.append(codes.float() * scales[:, :1] / 8)
    found = [weight for weight in coded if isinstance(weight, CodedWeight)]
    return expert_products.stacked_codes(found), torch.stack(wants) * 8


@pytest.mark.parametrize("form", ["plain", "int4", "fp8", "fp8 groups"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "num_used"), [(1, 2), (23, 3)])
def test_products_are_those_of_each_rows_experts(
    form: str, activation: Activation | None, rows: int, num_used: int, generator: torch.Generator
) -> None:
    shape = (5, 72, 192)
    if form == "plain":
        weight = torch.randn(shape, generator=generator, device=generator.device).bfloat16() / 8
        weights, want = plain_weights(weight), weight.float()
    else:
        weights, want = coded_weights(form, shape, generator)
    x = torch.randn(rows, 192, generator=generator, device=generator.device).bfloat16() / 16
    chosen = random_choice(rows, 5, num_used, generator)
    order = expert_order(chosen, 5, expert_products.tile_rows(weights, chosen.numel()))

    got = expert_product(x, weights, order, slots_per_row=num_used, activation=activation).double()
    exact = product_reference(x, want, chosen, activation=activation).double()
    assert float((got - exact).norm() / exact.norm()) < 8e-3


def test_a_second_product_has_a_row_of_its_own_for_each_slot(generator: torch.Generator) -> None:
    weight = torch.randn(4, 40, 96, generator=generator, device=generator.device)
    x = torch.randn(11 * 2, 96, generator=generator, device=generator.device)
    chosen = random_choice(11, 4, 2, generator)
    order = expert_order(chosen, 4, expert_products.tile_rows(plain_weights(weight), 22))

    got = expert_product(x, plain_weights(weight), order, slots_per_row=1)
    torch.testing.assert_close(got, product_reference(x, weight, chosen), rtol=1e-4, atol=1e-4)


def row_weights(shape: tuple[int, int, int], generator: torch.Generator) -> ExpertRowWeights:
    codes = torch.randint(-127, 128, shape, generator=generator, device=generator.device).to(torch.int8)
    scales = torch.rand(shape[:2], generator=generator, device=generator.device) / 500
    return ExpertRowWeights(codes, scales, codes.sum(2, dtype=torch.int32))


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(("rows", "num_used", "size"), [(1, 2, 192), (23, 3, 256)])
def test_products_of_int8_with_int8_are_exact_before_they_are_rounded(
    rows: int, num_used: int, size: int, generator: torch.Generator, *, is_symmetric: bool
) -> None:
    weights = row_weights((5, 72, size), generator)
    x = torch.randn(rows, size, generator=generator, device=generator.device) + 1
    coded = coded_rows(x, torch.int8, is_symmetric=is_symmetric)
    chosen = random_choice(rows, 5, num_used, generator)
    order = expert_order(chosen, 5, row_tile_rows(weights, chosen.numel()))

    got = expert_rows_product(coded, weights, order, torch.float32, slots_per_row=num_used)
    want = rows_product_reference(coded, weights, chosen)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_products_of_int8_end_in_the_gate(activation: Activation, generator: torch.Generator) -> None:
    """38 of gate and as many of up: a tile ends within them. Each slot has a row of its own."""
    weights = row_weights((4, 76, 128), generator)
    x = coded_rows(torch.randn(22, 128, generator=generator, device=generator.device), torch.int8)
    chosen = random_choice(11, 4, 2, generator)
    order = expert_order(chosen, 4, row_tile_rows(weights, 22))

    got = expert_rows_product(x, weights, order, torch.float32, slots_per_row=1, activation=activation)
    want = gate_by_torch(rows_product_reference(x, weights, chosen).float(), activation)
    assert isinstance(want, Tensor)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots_per_row", [1, 2])
def test_inputs_are_in_the_order_of_each_slots_expert(slots_per_row: int, generator: torch.Generator) -> None:
    """Orders may be longer than rows, and name a number twice."""
    device = generator.device
    chosen = random_choice(7, 5, 2, generator)
    x = torch.randn(14 // slots_per_row, 1100, generator=generator, device=device).bfloat16()
    orders = torch.randint(0, 1100, (5, 1152), generator=generator, device=device)

    got = ordered_inputs(x, chosen, orders, slots_per_row=slots_per_row)
    assert torch.equal(got, ordered_reference(x, chosen, orders))


@pytest.mark.parametrize("slots_per_row", [1, 2])
def test_inputs_become_codes_by_each_slots_expert(slots_per_row: int, generator: torch.Generator) -> None:
    device = generator.device
    chosen = random_choice(7, 5, 2, generator)
    x = torch.randn(14 // slots_per_row, 1100, generator=generator, device=device).bfloat16()
    scales = torch.rand(5, generator=generator, device=device) / 50 + 0.002
    zeros = torch.tensor([0, 3, -7, 100, -128], dtype=torch.int32, device=device)

    got = coded_inputs(x, chosen, scales, zeros, slots_per_row=slots_per_row)
    own = chosen.flatten().long()
    assert torch.equal(got.scales, scales[own])
    assert got.zeros is not None
    assert torch.equal(got.zeros, zeros[own])
    assert torch.equal(got.codes, coded_reference(x, chosen, scales, zeros))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    weights = plain_weights(torch.randn(4, 40, 96, device=device))
    order = expert_order(torch.empty(0, 2, dtype=torch.int32, device=device), 4, 8)

    assert expert_product(torch.empty(0, 96, device=device), weights, order, slots_per_row=2).shape == (0, 40)
    assert choose_experts(torch.empty(0, 4, device=device), 2, normalizes=True)[1].shape == (0, 2)
    none = torch.empty(0, 96, device=device)
    rows = row_weights((4, 40, 96), torch.Generator(device))
    found = expert_rows_product(coded_rows(none, torch.int8), rows, order, torch.float32, slots_per_row=2)
    assert found.shape == (0, 40)
    chosen = torch.empty(0, 2, dtype=torch.int32, device=device)
    orders = torch.zeros(4, 96, dtype=torch.int64, device=device)
    assert ordered_inputs(none, chosen, orders, slots_per_row=2).shape == (0, 96)
    assert expert_sum(torch.empty(0, 40, device=device), torch.empty(0, 2, device=device)).shape == (0, 40)
