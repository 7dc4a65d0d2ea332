"""A mixture of experts against one product per token and expert, and its router against transformers'."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headway_runtime.layers import cpu_kernels, linear
from headway_runtime.layers.experts import ROWS_AT_ONCE, Experts, GatedMLP
from headway_runtime.layers.gate import Gate
from headway_runtime.layers.linear import make_linear

CPU = torch.device("cpu")
HIDDEN, SIZE = 64, 48


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown if the test fails
    return torch.Generator().manual_seed(seed)


class Mixture:
    """Random experts, as a layer and as plain tensors."""

    def __init__(
        self, num_experts: int, num_used: int, dtype: torch.dtype, generator: torch.Generator, **how: Any
    ) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).mul_(0.3).to(dtype)

        self.router = draw(num_experts, HIDDEN)
        self.gate_up, self.down = draw(num_experts, 2 * SIZE, HIDDEN), draw(num_experts, HIDDEN, SIZE)
        gate = Gate("silu", SIZE, dtype, CPU)
        mlps = [
            GatedMLP(make_linear([*gate_up.chunk(2)]), gate, make_linear([down]))
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        ]
        self.layer = Experts(make_linear([self.router]), mlps, num_used, dtype, CPU, **how)

    def one_by_one(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """In float32, token by token."""
        rows = []
        for token, shares, experts in zip(x.float(), weights, chosen, strict=True):
            total = torch.zeros(HIDDEN)
            for share, expert in zip(shares, experts, strict=True):
                gate, up = (self.gate_up[expert].float() @ token).chunk(2)
                total += share * (self.down[expert].float() @ (torch.nn.functional.silu(gate) * up))
            rows.append(total)
        return torch.stack(rows)


def probabilities_of(mixture: Mixture, x: Tensor) -> Tensor:
    return (x.float() @ mixture.router.float().T).softmax(-1)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, ROWS_AT_ONCE + 13])
@pytest.mark.parametrize(("num_experts", "num_used"), [(1, 1), (4, 2), (16, 16), (128, 8)])
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("whose", ["our kernels", "PyTorch's operators"])
def test_tokens_get_the_sum_of_their_experts(
    whose: str,
    normalizes: Any,
    num_experts: int,
    num_used: int,
    rows: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if whose != "our kernels":
        monkeypatch.setattr(cpu_kernels, "_are_available", lambda: False)
    mixture = Mixture(num_experts, num_used, torch.float32, generator, normalizes=normalizes)
    x = torch.randn((rows, HIDDEN), generator=generator)
    weights, chosen = probabilities_of(mixture, x).topk(num_used)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    want = mixture.one_by_one(x, weights, chosen)
    torch.testing.assert_close(mixture.layer(x), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("whose", ["ours where there are any", "oneDNN's products", "PyTorch's"])
def test_tokens_do_not_hang_on_others_in_bfloat16(
    whose: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whose != "ours where there are any":
        monkeypatch.setattr(linear, "pairs_linear", lambda parts, bias: None)
    if whose == "PyTorch's":
        monkeypatch.setattr(cpu_kernels, "_are_available", lambda: False)
        monkeypatch.setattr(linear, "can_pack", lambda: False)
    mixture = Mixture(8, 2, torch.bfloat16, generator, normalizes=True)
    x = torch.randn((90, HIDDEN), generator=generator).bfloat16()
    # As it chooses itself: another order of additions may tip a choice.
    weights, chosen = mixture.layer._route(x)
    want = mixture.one_by_one(x, weights, chosen)
    got = mixture.layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.02 * float(want.abs().max()), rtol=0.0)
    likely = (probabilities_of(mixture, x).topk(2).indices == chosen).float().mean()
    assert likely > 0.9


def test_experts_that_no_token_wants_are_not_computed(generator: torch.Generator) -> None:
    mixture = Mixture(6, 1, torch.float32, generator, normalizes=True)
    x = torch.randn((3, HIDDEN), generator=generator)
    wanted = set(probabilities_of(mixture, x).argmax(-1).tolist())
    for index, expert in enumerate(mixture.layer._experts):
        if index not in wanted:
            object.__setattr__(expert, "gate_up", None)
    assert mixture.layer(x).isfinite().all()
    assert mixture.layer(x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe", "qwen3 moe, normalized"])
def test_router_chooses_and_weighs_as_that_of_transformers(
    family: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """On the same logits: whose product those are of is not the router's business."""
    normalizes = family != "qwen3 moe"
    sizes: Any = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
    router: Any = (
        MixtralTopKRouter(MixtralConfig(**sizes, num_local_experts=12))  # type: ignore[no-untyped-call]
        if family == "mixtral"
        else Qwen3MoeTopKRouter(  # type: ignore[no-untyped-call]
            Qwen3MoeConfig(**sizes, num_experts=12, norm_topk_prob=normalizes)
        )
    )
    mixture = Mixture(12, 3, dtype, generator, normalizes=normalizes)
    router.weight.data = mixture.router
    # Of another copy of the weights PyTorch may round a logit otherwise.
    same: Any = lambda x: torch.nn.functional.linear(x, router.weight)  # noqa: E731
    mixture.layer._router = same
    x = torch.randn((200, HIDDEN), generator=generator).to(dtype)
    with torch.inference_mode():
        _, want_weights, want_chosen = router(x)
    weights, chosen = mixture.layer._route(x)
    assert torch.equal(chosen, want_chosen)
    # Qwen's are rounded to the type of the model, ours never.
    torch.testing.assert_close(weights.to(want_weights.dtype), want_weights, atol=0.0, rtol=1e-6)
