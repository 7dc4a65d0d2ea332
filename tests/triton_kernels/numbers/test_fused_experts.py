"""A mixture of experts whose experts are one is the mixture that they are one by one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.errors import ConfigError
from headway_runtime.kernels.triton.expert_order import choice_reference
from headway_runtime.layers import fused_experts, kernel_choice, quantized_linear
from headway_runtime.layers.expert_products import ExpertProduct, IntegerProduct, NumberProduct
from headway_runtime.layers.experts import Experts, GatedMLP
from headway_runtime.layers.gate import Gate
from headway_runtime.layers.linear import make_linear
from headway_runtime.layers.quantized_linear import as_integers, make_merged_linear
from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
)
from headway_runtime.layers.quantizer import quantized, quantized_as
from headway_runtime.quantization.scheme import Scheme

HIDDEN, SIZE, NUM_EXPERTS = 128, 96, 6


@dataclass(frozen=True)
class Mixture:
    """router: [experts, hidden]. gates, ups: [experts, size, hidden]. downs: [experts, hidden, size]."""

    router: Tensor
    gates: Tensor
    ups: Tensor
    downs: Tensor
    # Of each expert's two products, where inputs are integers.
    inputs: tuple[tuple[Int8Input, Int8Input], ...] = ()

    def wanted(self, x: Tensor, num_used: int, *, normalizes: bool) -> Tensor:
        """float32, of each row by itself."""
        logits = functional.linear(x, self.router)
        return self.wanted_of(x, *choice_reference(logits, num_used, normalizes=normalizes))

    def wanted_of(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Likewise, of these experts: each [rows, num_used]."""
        rows = []
        for row, own, experts in zip(x.float(), weights, chosen, strict=True):
            results = [self._result(row, int(expert), x.dtype) for expert in experts]
            rows.append(torch.stack([w * result for w, result in zip(own, results, strict=True)]).sum(0))
        return torch.stack(rows)

    def _result(self, row: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
        gate, up, down = (each[expert].float() for each in (self.gates, self.ups, self.downs))
        if not self.inputs:
            return down @ (functional.silu(gate @ row) * (up @ row))
        row = self._rounded(row, self.inputs[expert][0])
        gate_numbers, up_numbers = ((one @ row).to(dtype).float() for one in (gate, up))
        middle = (functional.silu(gate_numbers) * up_numbers).to(dtype).float()
        return down @ self._rounded(middle, self.inputs[expert][1])

    @staticmethod
    def _rounded(row: Tensor, quantization: Int8Input) -> Tensor:
        numbers, scale = as_integers(row[None], quantization)
        return (numbers * scale)[0]


def random_mixture(dtype: torch.dtype, generator: torch.Generator) -> Mixture:
    shapes = [
        (NUM_EXPERTS, HIDDEN),
        (NUM_EXPERTS, SIZE, HIDDEN),
        (NUM_EXPERTS, SIZE, HIDDEN),
        (NUM_EXPERTS, HIDDEN, SIZE),
    ]
    tensors = [
        torch.randn(shape, generator=generator, device=generator.device).to(dtype) / 8 for shape in shapes
    ]
    router, gates, ups, downs = tensors
    return Mixture(4 * router, gates, ups, downs)


Part = Tensor | QuantizedWeight
# Gate, up and down of an expert, by its number, as they are kept.
Keep = Callable[[int, tuple[Tensor, Tensor, Tensor]], list[Part]]


def in_int8(inputs: Callable[[int], Int8Input]) -> Keep:
    def keep(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
        found = [quantized(one, "int8") for one in weights]
        return [replace(one, input=inputs(number)) for one in found if isinstance(one, Int8Weight)]

    return keep


def in_order(*, is_shared: bool) -> Keep:
    """Each expert's inputs in an order of its own; is_shared: of gate and up the same."""

    def keep(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
        found: list[Part] = []
        for index, one in enumerate(weights):
            seed = 10 * number + (index // 2 if is_shared else index)
            order = torch.randperm(one.shape[1], generator=torch.Generator().manual_seed(seed))
            weight = quantized_as(one, Scheme("packed", 4, "group", group_size=32, is_symmetric=False))
            assert isinstance(weight, Int4Weight)
            found.append(replace(weight, input_order=order.to(one.device)))
        return found

    return keep


def in_blocks(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
    found: list[Part] = []
    for one in weights:
        shape = (-(-one.shape[0] // 64), one.shape[1] // 32)
        scales = torch.linspace(0.5, 1.5, shape[0] * shape[1], device=one.device).view(shape)
        found.append(Fp8Weight(one.to(torch.float8_e4m3fn), scales, (64, 32)))
    return found


def with_meanings(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
    """Of odd experts scales are too fine for float16."""
    found = [quantized(one, "int4") for one in weights]
    if number % 2:
        found = [replace(one, scales=one.scales * (1 + 2**-20)) for one in found]
    return [*found]


def in_groups_of_16(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
    return [quantized_as(one, Scheme("packed", 4, "group", group_size=16)) for one in weights]


def by_turns(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
    return [quantized(one, "int8" if number % 2 else "int4") for one in weights]


def in_8_bits_behind_4(number: int, weights: tuple[Tensor, Tensor, Tensor]) -> list[Part]:
    gate, up, down = weights
    return [quantized(gate, "int4"), quantized(up, "int4"), quantized(down, "int8")]


# And in which form the products of gate and up, and of down, read them.
KEPT: dict[str, tuple[Keep, str, str]] = {
    "int8 inputs": (in_int8(lambda number: Int8Input()), "int8 rows", "int8 rows"),
    "ranges of inputs": (in_int8(lambda number: Int8Input(is_symmetric=False)), "int8 rows", "int8 rows"),
    "measured inputs": (
        in_int8(lambda number: Int8Input(0.03 + number / 100, number - 3)),
        "int8 rows",
        "int8 rows",
    ),
    "some inputs with zeros": (
        in_int8(lambda number: Int8Input(is_symmetric=number > 0)),
        "plain",
        "plain",
    ),
    "act-order": (in_order(is_shared=True), "int4", "int4"),
    "act-order of gate and up apart": (in_order(is_shared=False), "plain", "int4"),
    "narrow blocks": (in_blocks, "fp8", "fp8"),
    "unlike scales": (with_meanings, "int4", "int4"),
    "groups of 16": (in_groups_of_16, "plain", "plain"),
    "4 bits and 8 by turns": (by_turns, "plain", "plain"),
    "4 bits, then 8": (in_8_bits_behind_4, "int4", "int8"),
}


def layer(mixture: Mixture, num_used: int, form: str, *, normalizes: bool) -> tuple[Experts, Mixture]:
    """And the mixture that its weights stand for."""
    dtype, device = mixture.router.dtype, mixture.router.device
    gate, mlps = Gate("silu", SIZE, dtype, device), []
    stands: list[list[Tensor]] = [[], [], []]
    inputs: list[tuple[Int8Input, Int8Input]] = []
    for number, each in enumerate(zip(mixture.gates, mixture.ups, mixture.downs, strict=True)):
        kept: list[Part]
        if form in KEPT:
            kept = KEPT[form][0](number, each)
        else:
            kept = [*each] if form == "plain" else [quantized(one, form) for one in each]  # type: ignore[arg-type]
        own_inputs = [one.input for one in kept[1:] if isinstance(one, Int8Weight) and one.input is not None]
        if own_inputs and KEPT[form][1] == "int8 rows":
            inputs.append((own_inputs[0], own_inputs[1]))
        for own, one in zip(stands, kept, strict=True):
            own.append(one if isinstance(one, Tensor) else one.dequantized(torch.float32))
        gate_up, down = (make_merged_linear(parts, None, dtype) for parts in (kept[:2], kept[2:]))
        mlps.append(GatedMLP(gate_up, gate, down))
    experts = Experts(make_linear([mixture.router]), mlps, num_used, dtype, device, normalizes=normalizes)
    gates, ups, downs = (torch.stack(own) for own in stands)
    return experts, Mixture(mixture.router, gates, ups, downs, tuple(inputs))


@pytest.fixture
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_choice", lambda: "triton")
    # What only CPUs have products for.
    monkeypatch.setattr(quantized_linear, "_packed", lambda parts, bias: None)


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("form", ["plain", "fp8", "int8", "int4"])
@pytest.mark.parametrize(("rows", "num_used"), [(1, 2), (19, 3)])
def test_results_are_those_of_each_rows_own_experts(
    form: str, rows: int, num_used: int, generator: torch.Generator, *, normalizes: bool
) -> None:
    mixture = random_mixture(torch.bfloat16, generator)
    experts, stands = layer(mixture, num_used, form, normalizes=normalizes)
    assert experts._fused is not None
    x = torch.randn(rows, HIDDEN, generator=generator, device=generator.device).bfloat16()

    got, want = experts(x).float(), stands.wanted(x, num_used, normalizes=normalizes)
    assert float((got - want).norm() / want.norm()) < 1.5e-2


def form_of(product: ExpertProduct) -> str:
    if isinstance(product, NumberProduct):
        return product.weights.form
    assert isinstance(product, IntegerProduct)
    return "int8 rows"


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize("kind", KEPT)
def test_experts_of_any_checkpoint_are_one(kind: str, rows: int, generator: torch.Generator) -> None:
    experts, stands = layer(random_mixture(torch.bfloat16, generator), 2, kind, normalizes=True)
    assert experts._fused is not None
    assert (form_of(experts._fused._gate_up), form_of(experts._fused._down)) == KEPT[kind][1:]
    x = torch.randn(rows, HIDDEN, generator=generator, device=generator.device).bfloat16()

    got, want = experts(x).float(), stands.wanted(x, 2, normalizes=True)
    assert float((got - want).norm() / want.norm()) < 1.5e-2


@pytest.mark.usefixtures("_triton")
def test_what_becomes_plain_numbers_is_told_once(
    generator: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    fused_experts._tell_plain.cache_clear()
    for kind in ("int4", "groups of 16", "groups of 16"):
        layer(random_mixture(torch.bfloat16, generator), 2, kind, normalizes=True)

    told = [record.getMessage() for record in caplog.records if "plain numbers" in record.getMessage()]
    assert len(told) == 2
    assert ("(gate and up)" in told[0], "(down)" in told[1]) == (True, True)


@pytest.mark.usefixtures("_triton")
def test_plain_numbers_that_do_not_fit_are_refused(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(fused_experts, "plain_product_of_experts", out_of_memory)
    mixture = random_mixture(torch.bfloat16, generator)

    assert layer(mixture, 2, "int4", normalizes=True)[0]._fused is not None
    with pytest.raises(ConfigError, match=r"experts \(gate and up\) do not fit as plain numbers, 0.00 GiB"):
        layer(mixture, 2, "groups of 16", normalizes=True)


@pytest.mark.usefixtures("_triton")
def test_float32_is_exact_to_its_own_rounding(generator: torch.Generator) -> None:
    mixture = random_mixture(torch.float32, generator)
    experts, _ = layer(mixture, 2, "plain", normalizes=True)
    x = torch.randn(7, HIDDEN, generator=generator)

    torch.testing.assert_close(experts(x), mixture.wanted(x, 2, normalizes=True), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize("form", ["plain", "int4", "int8 inputs", "groups of 16"])
def test_single_experts_are_let_go_of(form: str, generator: torch.Generator) -> None:
    experts, _ = layer(random_mixture(torch.bfloat16, generator), 2, form, normalizes=True)

    assert experts._fused is not None
    assert experts._experts == []
    assert experts.linears == (experts._router,)


@pytest.mark.usefixtures("_triton")
def test_experts_with_a_bias_are_computed_one_by_one(generator: torch.Generator) -> None:
    mixture = random_mixture(torch.bfloat16, generator)
    dtype, device = torch.bfloat16, generator.device
    gate = Gate("silu", SIZE, dtype, device)
    biases = [None, *(torch.zeros(HIDDEN, dtype=dtype, device=device) for _ in range(NUM_EXPERTS - 1))]
    mlps = [
        GatedMLP(make_linear([gate_weight, up]), gate, make_linear([down], bias))
        for gate_weight, up, down, bias in zip(mixture.gates, mixture.ups, mixture.downs, biases, strict=True)
    ]
    experts = Experts(make_linear([mixture.router]), mlps, 2, dtype, device, normalizes=True)
    x = torch.randn(5, HIDDEN, generator=generator, device=device).to(dtype)

    assert experts._fused is None
    # As it chooses itself: it takes any of equals.
    want = mixture.wanted_of(x, *experts._route(x))
    assert float((experts(x).float() - want).norm() / want.norm()) < 1.5e-2


def test_without_triton_there_is_nothing_fused(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "_choice", lambda: "torch")
    experts, _ = layer(random_mixture(torch.bfloat16, generator), 2, "plain", normalizes=True)

    assert experts._fused is None
