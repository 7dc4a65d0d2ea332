"""A mixture of experts whose experts are one is the mixture that they are one by one."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers import kernel_choice
from headway_runtime.layers.experts import Experts, GatedMLP
from headway_runtime.layers.gate import Gate
from headway_runtime.layers.linear import Linear, make_linear
from headway_runtime.layers.quantized_linear import make_merged_linear
from headway_runtime.layers.quantized_weights import QuantizedWeight
from headway_runtime.layers.quantizer import quantized

HIDDEN, SIZE, NUM_EXPERTS = 128, 96, 6


@dataclass(frozen=True)
class Mixture:
    """router: [experts, hidden]. gates, ups: [experts, size, hidden]. downs: [experts, hidden, size]."""

    router: Tensor
    gates: Tensor
    ups: Tensor
    downs: Tensor

    def wanted(self, x: Tensor, num_used: int, *, normalizes: bool) -> Tensor:
        """float32, of each row by itself."""
        probabilities = functional.linear(x, self.router).float().softmax(-1)
        weights, chosen = probabilities.topk(num_used)
        if normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        rows = []
        for row, own, experts in zip(x.float(), weights, chosen, strict=True):
            results = [
                self.downs[expert].float()
                @ (functional.silu(self.gates[expert].float() @ row) * (self.ups[expert].float() @ row))
                for expert in experts
            ]
            rows.append(torch.stack([w * result for w, result in zip(own, results, strict=True)]).sum(0))
        return torch.stack(rows)


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
    tensors[0] *= 4
    return Mixture(*tensors)


def layer(mixture: Mixture, num_used: int, form: str, *, normalizes: bool) -> tuple[Experts, Mixture]:
    """And the mixture that its weights stand for."""
    dtype, device = mixture.router.dtype, mixture.router.device
    gate, mlps = Gate("silu", SIZE, dtype, device), []
    stands: list[list[Tensor]] = [[], [], []]
    for each in zip(mixture.gates, mixture.ups, mixture.downs, strict=True):
        kept: list[Tensor | QuantizedWeight] = (
            [*each] if form == "plain" else [quantized(one, form) for one in each]  # type: ignore[arg-type]
        )
        for own, one in zip(stands, kept, strict=True):
            own.append(one if isinstance(one, Tensor) else one.dequantized(torch.float32))
        gate_up, down = (make_merged_linear(parts, None, dtype) for parts in (kept[:2], kept[2:]))
        mlps.append(GatedMLP(gate_up, gate, down))
    experts = Experts(make_linear([mixture.router]), mlps, num_used, dtype, device, normalizes=normalizes)
    return experts, Mixture(mixture.router, *(torch.stack(own) for own in stands))


@pytest.fixture
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_choice", lambda: "triton")


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


@pytest.mark.usefixtures("_triton")
def test_float32_is_exact_to_its_own_rounding(generator: torch.Generator) -> None:
    if generator.device.type == "cuda":
        pytest.skip("float32 on a GPU is left to torch")
    mixture = random_mixture(torch.float32, generator)
    experts, _ = layer(mixture, 2, "plain", normalizes=True)
    x = torch.randn(7, HIDDEN, generator=generator)

    torch.testing.assert_close(experts(x), mixture.wanted(x, 2, normalizes=True), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize("form", ["plain", "int4"])
def test_weights_lie_in_memory_once(form: str, generator: torch.Generator) -> None:
    experts, _ = layer(random_mixture(torch.bfloat16, generator), 2, form, normalizes=True)
    assert experts._fused is not None
    one = experts._fused._gate_up
    whole = one.plain if one.coded is None else one.coded.codes
    assert whole is not None
    for expert, own in zip(experts._experts, whole, strict=True):
        linear = expert.gate_up
        part = linear.weight if isinstance(linear, Linear) else linear.weight.codes  # type: ignore[union-attr]
        assert part.data_ptr() == own.data_ptr()
        assert torch.equal(part, own)


@pytest.mark.usefixtures("_triton")
def test_unlike_experts_are_computed_one_by_one(generator: torch.Generator) -> None:
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
    want = mixture.wanted(x, 2, normalizes=True)
    assert float((experts(x).float() - want).norm() / want.norm()) < 1.5e-2


def test_without_triton_there_is_nothing_fused(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "_choice", lambda: "torch")
    experts, _ = layer(random_mixture(torch.bfloat16, generator), 2, "plain", normalizes=True)

    assert experts._fused is None
