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

from headway_runtime.kernels.triton import expert_inputs as inputs
from headway_runtime.kernels.triton import expert_order as orders
from headway_runtime.kernels.triton import expert_product as products
from headway_runtime.kernels.triton import expert_rows_product as row_products
from headway_runtime.kernels.triton import expert_sum as sums
from headway_runtime.kernels.triton.coded_plain import plain_reference
from headway_runtime.kernels.triton.coded_rows import CodedRows, coded_rows
from headway_runtime.kernels.triton.coded_weight import Form
from headway_runtime.kernels.triton.expert_product import ExpertWeights
from headway_runtime.kernels.triton.launch import DEFAULT
from headway_runtime.kernels.triton.row_products import class_of_rows
from headway_runtime.layers.expert_products import NumberProduct
from headway_runtime.layers.fused_experts import FusedExperts

FLOAT_BYTES = 4


def experts_case(
    name: str,
    model: ModelShape,
    rows: int,
    form: Form | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    is_broken: bool = False,
) -> Case:
    """All of a layer's experts, from the router's logits on. form: of weights; None: plain ones.

    dtype: of inputs. is_broken: the first row's logits are NaN, and all others' results are what they were.
    """
    bits = 8.0 * dtype.itemsize if form is None else WEIGHT_BITS[FORM_WEIGHTS[form]]

    def make(generator: Generator) -> Work:
        gate_up = _weights(form, model.num_experts, (2 * model.middle, model.hidden), generator, dtype)
        down = _weights(form, model.num_experts, (model.hidden, model.middle), generator, dtype)
        x = normal(generator, rows, model.hidden).to(dtype)
        logits = normal(generator, rows, model.num_experts)
        products_of = NumberProduct(gate_up), NumberProduct(down)
        fused = FusedExperts(*products_of, "silu", model.num_used, normalizes=True)
        if is_broken:
            given = logits.clone()
            given[0] = torch.nan

            def shown(found: Tensor) -> Result:
                return found[1:], found[0].isnan().int()

            return Work(
                lambda: fused(x, given),
                lambda: (
                    _exact(x, logits, gate_up, down, model)[1:],
                    torch.ones_like(x[0], dtype=torch.int32),
                ),
                shown,
            )
        return Work(
            lambda: fused(x, logits),
            lambda: _exact(x, logits, gate_up, down, model),
            peers=_peers(x, logits, model, generator) if dtype == torch.bfloat16 else {},
        )

    slots_of_expert = -(-rows * model.num_used // model.num_experts)
    kernel = products.KERNELS[form or ("float32" if dtype == torch.float32 else "plain")]
    return Case(name, kernel, class_of_rows(slots_of_expert), make, costs.experts(model, rows, bits))


def rows_case(name: str, model: ModelShape, rows: int, *, has_zeros: bool = False) -> Case:
    """The first product of experts of int8 with inputs of int8. has_zeros: inputs have zero points."""

    def make(generator: Generator) -> Work:
        shape, device = (model.num_experts, 2 * model.middle, model.hidden), generator.device
        codes = torch.randint(-127, 128, shape, generator=generator, device=device).to(torch.int8)
        scales = torch.rand(shape[:2], generator=generator, device=device) / 2000
        sums = codes.sum(2, dtype=torch.int32) if has_zeros else None
        weights = row_products.ExpertRowWeights(codes, scales, sums)
        x = coded_rows(normal(generator, rows, model.hidden), torch.int8, is_symmetric=not has_zeros)
        chosen = _choice(model, rows, generator)
        tile_rows = row_products.row_tile_rows(weights, chosen.numel())
        order = orders.expert_order(chosen, model.num_experts, tile_rows)

        def run() -> Tensor:
            used = model.num_used
            return row_products.expert_rows_product(x, weights, order, torch.bfloat16, slots_per_row=used)

        return Work(run, lambda: _rows_exact(x, weights, chosen))

    both = costs.experts(model, rows, 8.0)
    slots_of_expert = -(-rows * model.num_used // model.num_experts)
    cost = Cost(both.num_bytes * 2 / 3, both.operations * 2 / 3, "int8")
    return Case(name, row_products.KERNEL, class_of_rows(slots_of_expert), make, cost)


def inputs_case(name: str, model: ModelShape, rows: int, *, as_codes: bool) -> Case:
    """Rows of slots: in their experts' orders, or as codes by their experts' scales."""
    slots = rows * model.num_used

    def make(generator: Generator) -> Work:
        x, chosen = normal(generator, rows, model.hidden), _choice(model, rows, generator)
        noise = torch.rand(model.num_experts, model.hidden, generator=generator, device=generator.device)
        if not as_codes:
            order, used = noise.argsort(1), model.num_used
            return Work(
                lambda: inputs.ordered_inputs(x, chosen, order, slots_per_row=used),
                lambda: inputs.ordered_reference(x, chosen, order),
            )
        scales, zeros = noise[:, 0] / 50 + 0.01, (noise[:, 1] * 20 - 10).int()
        return Work(
            lambda: inputs.coded_inputs(x, chosen, scales, zeros, slots_per_row=model.num_used),
            lambda: inputs.coded_reference(x, chosen, scales, zeros),
            shown=lambda got: got.codes,
        )

    kernel = inputs.CODES_KERNEL if as_codes else inputs.ORDER_KERNEL
    written = costs.NUMBER_BYTES - int(as_codes)
    cost = Cost((rows * costs.NUMBER_BYTES + slots * written) * model.hidden)
    return Case(name, kernel, DEFAULT, make, cost)


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


def broken_choice_case(name: str, model: ModelShape, *, normalizes: bool) -> Case:
    """Rows that are no numbers choose experts that there are, by weights that are NaN."""
    broken, rows, experts = [1, 2, 4], 6, model.num_experts

    def make(generator: Generator) -> Work:
        order = torch.rand(rows, experts, generator=generator, device=generator.device).argsort(-1)
        logits = (order / 8 - 2).bfloat16()
        logits[1, experts // 2], logits[4] = torch.nan, -torch.inf
        logits[2, 0] = torch.inf

        def shown(found: tuple[Tensor, Tensor]) -> Result:
            weights, chosen = found
            return weights.isnan().int(), ((chosen >= 0) & (chosen < experts)).int()

        def exact() -> Result:
            is_broken = torch.zeros(rows, model.num_used, dtype=torch.int32)
            is_broken[broken] = 1
            return is_broken, torch.ones_like(is_broken)

        def run() -> tuple[Tensor, Tensor]:
            return orders.choose_experts(logits, model.num_used, normalizes=normalizes)

        return Work(run, exact, shown)

    cost = Cost(rows * (experts * costs.NUMBER_BYTES + 2 * model.num_used * FLOAT_BYTES))
    return Case(name, orders.CHOICE_KERNEL, str(experts), make, cost, tolerance=0.0)


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
    form: Form | None,
    num_experts: int,
    shape: tuple[int, int],
    generator: Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> ExpertWeights:
    outputs, num_inputs = shape
    if form is None:
        plain = torch.empty(num_experts, outputs, num_inputs, dtype=dtype, device=generator.device)
        plain.normal_(generator=generator).div_(math.sqrt(num_inputs))
        return ExpertWeights(num_experts, outputs, num_inputs, plain, None)
    return products.stacked_codes([random_codes(form, shape, generator) for _ in range(num_experts)])


def _numbers(weights: ExpertWeights, expert: int) -> Tensor:
    """One expert's, float32."""
    if weights.plain is not None:
        return weights.plain[expert].float()
    return plain_reference(products.expert_of(weights, expert))


def _rows_exact(x: CodedRows, weights: row_products.ExpertRowWeights, chosen: Tensor) -> Tensor:
    """Expert by expert, float64."""
    zeros = 0 if x.zeros is None else x.zeros.double()[:, None]
    plain = (x.codes.double() - zeros) * x.scales.double()[:, None]
    out = plain.new_empty((*chosen.shape, weights.codes.shape[1]))
    for expert in range(weights.num_experts):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        weight = weights.codes[expert].double() * weights.scales[expert].double()[:, None]
        out[rows, places] = plain[rows] @ weight.t()
    return out.flatten(0, 1)


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
