"""All experts of a layer on a GPU: their weights as one, five launches whatever they are chosen for.

The host learns nothing of who chose whom, so a step can be captured. Experts whose weights are unlike, or
have a bias, or lie in an order of inputs of their own, are left to be computed one by one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway_runtime.layers.coded_linear import CodedLinear
from headway_runtime.layers.linear import AnyLinear, Linear
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.expert_product import ExpertWeights


class FusedExperts:
    """down(activation(gate) * up) of each row's experts, added up by weight."""

    __slots__ = ("_activation", "_down", "_gate_up", "_normalizes", "_num_used")

    def __init__(
        self,
        gate_up: "ExpertWeights",
        down: "ExpertWeights",
        activation: Activation,
        num_used: int,
        *,
        normalizes: bool,
    ) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self._num_used, self._normalizes = num_used, normalizes

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """x: [rows, hidden_size], contiguous. logits: of the router, [rows, experts]."""
        from headway_runtime.kernels.triton.expert_order import choose_experts, expert_order
        from headway_runtime.kernels.triton.expert_product import expert_product, tile_rows
        from headway_runtime.kernels.triton.expert_sum import expert_sum

        weights, chosen = choose_experts(logits, self._num_used, normalizes=self._normalizes)
        own = self._gate_up
        order = expert_order(chosen, own.num_experts, tile_rows(own, chosen.numel()))
        middle = expert_product(
            x.contiguous(), own, order, slots_per_row=self._num_used, activation=self._activation
        )
        return expert_sum(expert_product(middle, self._down, order, slots_per_row=1), weights)


def fuse_experts(
    gate_ups: Sequence[AnyLinear],
    downs: Sequence[AnyLinear],
    activation: Activation,
    num_used: int,
    *,
    normalizes: bool,
) -> FusedExperts | None:
    """None where they cannot be one. The layers' weights are then parts of the one, and take no memory."""
    if not (_are_alike(gate_ups) and _are_alike(downs)):
        return None
    first, second = gate_ups[0], downs[0]
    if _form(first) != _form(second):
        return None
    return FusedExperts(_as_one(gate_ups), _as_one(downs), activation, num_used, normalizes=normalizes)


def _form(linear: AnyLinear) -> str:
    return linear.weight.form if isinstance(linear, CodedLinear) else "plain"


def _are_alike(linears: Sequence[AnyLinear]) -> bool:
    if all(isinstance(linear, Linear) and linear.bias is None for linear in linears):
        return True
    coded = [linear for linear in linears if isinstance(linear, CodedLinear) and linear.is_bare]
    if len(coded) < len(linears):
        return False
    forms = {
        (weight.form, weight.meaning, weight.group_size, weight.scale_rows)
        for weight in (linear.weight for linear in coded)
    }
    return len(forms) == 1


def _as_one(linears: Sequence[AnyLinear]) -> "ExpertWeights":
    from headway_runtime.kernels.triton.expert_product import ExpertWeights, expert_of, stacked_codes

    plain = [linear for linear in linears if isinstance(linear, Linear)]
    if plain:
        weight = torch.stack([linear.weight for linear in plain])
        for linear, own in zip(plain, weight, strict=True):
            linear.weight = own
        return ExpertWeights(len(plain), plain[0].num_outputs, plain[0].num_inputs, weight, None)
    coded = [linear for linear in linears if isinstance(linear, CodedLinear)]
    weights = stacked_codes([linear.weight for linear in coded])
    for number, one in enumerate(coded):
        one.take(expert_of(weights, number))
    return weights
