"""All experts of a layer on a GPU: their weights as one, five to seven launches whatever they are chosen for.

The host learns nothing of who chose whom, so a step can be captured. Experts whose weights cannot be one as
they are become plain numbers.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from headway_runtime.errors import ConfigError
from headway_runtime.layers.expert_products import (
    ExpertProduct,
    plain_product_of_experts,
    product_of_experts,
)
from headway_runtime.layers.linear import AnyLinear
from headway_runtime.model_config import Activation

logger = logging.getLogger(__name__)


class FusedExperts:
    """down(activation(gate) * up) of each row's experts, added up by weight."""

    __slots__ = ("_activation", "_down", "_gate_up", "_normalizes", "_num_used")

    def __init__(
        self,
        gate_up: ExpertProduct,
        down: ExpertProduct,
        activation: Activation,
        num_used: int,
        *,
        normalizes: bool,
    ) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self._num_used, self._normalizes = num_used, normalizes

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """x: [rows, hidden_size]. logits: of the router, [rows, experts]."""
        from headway_runtime.kernels.triton.expert_order import choose_experts, expert_order
        from headway_runtime.kernels.triton.expert_sum import expert_sum

        weights, chosen = choose_experts(logits, self._num_used, normalizes=self._normalizes)
        first, second, num_slots = self._gate_up, self._down, chosen.numel()
        tile_rows = first.tile_rows(num_slots)
        order = expert_order(chosen, first.num_experts, tile_rows)
        middle = first(
            x.contiguous(), chosen, order, slots_per_row=self._num_used, activation=self._activation
        )
        if second.tile_rows(num_slots) != tile_rows:
            order = expert_order(chosen, second.num_experts, second.tile_rows(num_slots))
        return expert_sum(second(middle, chosen, order, slots_per_row=1), weights)


def fuse_experts(
    gate_ups: Sequence[AnyLinear],
    downs: Sequence[AnyLinear],
    activation: Activation,
    num_used: int,
    dtype: torch.dtype,
    *,
    normalizes: bool,
) -> FusedExperts | None:
    """None for experts with a bias. The layers' weights are copied: they are to be let go.

    ConfigError where there is no memory for those that must be plain numbers.
    """
    first, second = _product(gate_ups, "gate and up", dtype), _product(downs, "down", dtype)
    if first is None or second is None:
        return None
    return FusedExperts(first, second, activation, num_used, normalizes=normalizes)


def _product(linears: Sequence[AnyLinear], name: str, dtype: torch.dtype) -> ExpertProduct | None:
    if (product := product_of_experts(linears)) is not None:
        return product
    try:
        product = plain_product_of_experts(linears, dtype)
    except torch.OutOfMemoryError as error:
        first = linears[0]
        size = len(linears) * first.num_outputs * first.num_inputs * dtype.itemsize
        raise ConfigError(
            f"quantized weights of experts ({name}) do not fit as plain numbers, {size / 2**30:.2f} GiB a "
            "layer, which they must be here, since no kernel multiplies all of them as they are; use a "
            "checkpoint whose experts are quantized alike, in groups that 32 divides, or more GPUs by "
            f"--tensor-parallel-size ({error})"
        ) from error
    if product is not None:
        _tell_plain(name)
    return product


@cache
def _tell_plain(name: str) -> None:
    logger.warning(
        "quantized weights of experts (%s) are kept as plain numbers: they are not quantized alike, or in "
        "groups that no kernel reads; see docs/quantization.md",
        name,
    )
