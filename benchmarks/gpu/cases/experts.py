"""A mixture of experts: the choice, the order, both products, the sum; and all five as a layer runs them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from benchmarks.gpu import costs
from benchmarks.gpu.cases.case import Case, Peer, Result, Work, normal
from benchmarks.gpu.cases.products import FORM_WEIGHTS, random_codes
from benchmarks.gpu.costs import WEIGHT_BITS, Cost, ModelShape
from torch import Generator, Tensor

from headway_runtime.kernels.triton import expert_order as orders
from headway_runtime.kernels.triton import expert_product as products
from headway_runtime.kernels.triton import expert_sum as sums
from headway_runtime.kernels.triton.coded_plain import plain_reference
from headway_runtime.kernels.triton.coded_weight import Form
from headway_runtime.kernels.triton.expert_product import ExpertWeights
from headway_runtime.kernels.triton.row_products import class_of_rows
from headway_runtime.layers.fused_experts import FusedExperts

FLOAT_BYTES = 4


def experts_case(name: str, model: ModelShape, rows: int, form: Form | None = None) -> Case:
    """All of a layer's experts, from the router's logits on. form: of weights; None: plain ones."""
    bits = 16.0 if form is None else WEIGHT_BITS[FORM_WEIGHTS[form]]

    def make(generator: Generator) -> Work:
        gate_up = _weights(form, model.num_experts, (2 * model.middle, model.hidden), generator)
        down = _weights(form, model.num_experts, (model.hidden, model.middle), generator)
        x = normal(generator, rows, model.hidden)
        logits = normal(generator, rows, model.num_experts)
        fused = FusedExperts(gate_up, down, "silu", model.num_used, normalizes=True)
        return Work(
            lambda: fused(x, logits),
            lambda: _exact(x, logits, gate_up, down, model),
            peers=_peers(x, logits, model, generator),
        )

    slots_of_expert = -(-rows * model.num_used // model.num_experts)
    kernel = products.KERNELS["plain" if form is None else form]
    return Case(name, kernel, class_of_rows(slots_of_expert), make, costs.experts(model, rows, bits))


def choice_case(name: str, model: ModelShape, rows: int, *, normalizes: bool = True) -> Case:
    """Logits are whole numbers, all different: of equals, rounding would decide."""
    experts = model.num_experts

    def make(generator: Generator) -> Work:
        order = torch.rand(rows, experts, generator=generator, device=generator.device).argsort(-1)
        logits = (order / 8 - 2).bfloat16()

        def run() -> Result:
            return orders.choose_experts(logits, model.num_used, normalizes=normalizes)

        return Work(run, lambda: orders.choice_reference(logits, model.num_used, normalizes=normalizes))

    cost = Cost(rows * (experts * costs.NUMBER_BYTES + 2 * model.num_used * FLOAT_BYTES))
    return Case(name, orders.CHOICE_KERNEL, str(experts), make, cost, tolerance=1e-5)


def order_case(name: str, model: ModelShape, rows: int) -> Case:
    """Slots in the order of their experts, which must be the reference's to the last one."""

    def make(generator: Generator) -> Work:
        chosen = _choice(model, rows, generator)

        def run() -> Result:
            return orders.expert_order(chosen, model.num_experts, 16).order

        return Work(run, lambda: orders.order_reference(chosen))

    # Each expert's program reads all slots, from the L2 cache but for the first.
    cost = Cost(2.0 * rows * model.num_used * FLOAT_BYTES)
    return Case(name, orders.ORDER_KERNEL, str(model.num_experts), make, cost, tolerance=0.0)


def sum_case(name: str, model: ModelShape, rows: int) -> Case:
    """Results of each row's experts, added up by weight."""

    def make(generator: Generator) -> Work:
        results = normal(generator, rows * model.num_used, model.hidden)
        weights = torch.rand(rows, model.num_used, generator=generator, device=generator.device)

        def by_torch() -> Callable[[], object]:
            return lambda: (results.view(rows, model.num_used, -1) * weights.bfloat16()[..., None]).sum(1)

        return Work(
            lambda: sums.expert_sum(results, weights),
            lambda: sums.sum_reference(results, weights),
            peers={"torch": by_torch},
        )

    return Case(name, sums.KERNEL, str(model.hidden), make, costs.expert_sum(model, rows))


def _choice(model: ModelShape, rows: int, generator: Generator) -> Tensor:
    scores = torch.rand(rows, model.num_experts, generator=generator, device=generator.device)
    return scores.argsort(-1)[:, : model.num_used].to(torch.int32).contiguous()


def _weights(
    form: Form | None, num_experts: int, shape: tuple[int, int], generator: Generator
) -> ExpertWeights:
    outputs, inputs = shape
    if form is None:
        plain = torch.empty(num_experts, outputs, inputs, dtype=torch.bfloat16, device=generator.device)
        plain.normal_(generator=generator).div_(math.sqrt(inputs))
        return ExpertWeights(num_experts, outputs, inputs, plain, None)
    return products.stacked_codes([random_codes(form, shape, generator) for _ in range(num_experts)])


def _numbers(weights: ExpertWeights, expert: int) -> Tensor:
    """One expert's, float32."""
    if weights.plain is not None:
        return weights.plain[expert].float()
    return plain_reference(products.expert_of(weights, expert))


def _exact(
    x: Tensor, logits: Tensor, gate_up: ExpertWeights, down: ExpertWeights, model: ModelShape
) -> Tensor:
    """Expert by expert; the middle is rounded as it is when it is stored."""
    weights, chosen = orders.choice_reference(logits, model.num_used, normalizes=True)
    out = torch.zeros(len(x), model.hidden, device=x.device)
    for expert in range(model.num_experts):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        gate, up = functional.linear(x[rows].float(), _numbers(gate_up, expert)).chunk(2, -1)
        middle = (functional.silu(gate) * up).to(x.dtype).float()
        result = functional.linear(middle, _numbers(down, expert))
        out.index_add_(0, rows, result * weights[rows, places, None])
    return out


def _peers(x: Tensor, logits: Tensor, model: ModelShape, generator: Generator) -> dict[str, Peer]:
    """PyTorch's grouped products in bfloat16, of rows sorted by expert and put back by their slots."""
    if generator.device.type == "cpu":
        return {}

    def grouped() -> Callable[[], object]:
        experts = model.num_experts
        gate_up = _weights(None, experts, (2 * model.middle, model.hidden), generator).plain
        down = _weights(None, experts, (model.hidden, model.middle), generator).plain
        assert gate_up is not None
        assert down is not None
        right = [weight.transpose(1, 2) for weight in (gate_up, down)]

        def run() -> object:
            weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(model.num_used)
            order = chosen.flatten().argsort(stable=True)
            counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
            counts.index_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
            ends = counts.cumsum(0).int()
            own = x.index_select(0, order // model.num_used)
            gate, up = torch._grouped_mm(own, right[0], offs=ends).chunk(2, -1)
            results = torch._grouped_mm(functional.silu(gate) * up, right[1], offs=ends)
            of_slots = weights.flatten().index_select(0, order)[:, None]
            out = torch.zeros_like(x, dtype=torch.float32)
            return out.index_add_(0, order // model.num_used, results * of_slots)

        return run

    return {"grouped_mm": grouped}
