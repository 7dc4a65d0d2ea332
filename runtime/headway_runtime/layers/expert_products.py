"""One product of all experts of a mixture at once, for each way in which its inputs are taken.

Linear layers of the experts become one where they are alike: plain or coded numbers, codes whose inputs lie
in an order of each expert's own, int8 with int8 inputs. What is not alike, or in groups that no kernel reads,
can be plain numbers, which takes more memory and is as fast as experts that never were quantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headway_runtime.layers.coded_linear import CodedLinear, CodedRowsLinear
from headway_runtime.layers.linear import AnyLinear, Linear
from headway_runtime.layers.quantized_linear import IntegerInputLinear, SideBySideLinear, TiledLinear
from headway_runtime.layers.quantized_weights import Int8Input
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.coded_rows import CodedRows
    from headway_runtime.kernels.triton.expert_order import ExpertOrder
    from headway_runtime.kernels.triton.expert_product import ExpertWeights
    from headway_runtime.kernels.triton.expert_rows_product import ExpertRowWeights


class ExpertProduct(Protocol):
    """x of each slot, or of each row of several, times the weight of the slot's expert."""

    @property
    def num_experts(self) -> int: ...

    def tile_rows(self, num_slots: int) -> int:
        """What the order of slots must be cut into."""
        ...

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        order: "ExpertOrder",
        *,
        slots_per_row: int,
        activation: Activation | None = None,
    ) -> Tensor:
        """[slots, outputs], or half of them with `activation`.

        x: [slots / slots_per_row, inputs], contiguous. chosen: int32, the expert of each slot.
        """
        ...


@dataclass(frozen=True, slots=True)
class NumberProduct:
    """Of inputs as they are. orders: int64 [experts, inputs], by which each expert's are permuted first."""

    weights: "ExpertWeights"
    orders: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.weights.num_experts

    def tile_rows(self, num_slots: int) -> int:
        from headway_runtime.kernels.triton.expert_product import tile_rows

        return tile_rows(self.weights, num_slots)

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        order: "ExpertOrder",
        *,
        slots_per_row: int,
        activation: Activation | None = None,
    ) -> Tensor:
        from headway_runtime.kernels.triton.expert_inputs import ordered_inputs
        from headway_runtime.kernels.triton.expert_product import expert_product

        if self.orders is not None:
            x = ordered_inputs(x, chosen, self.orders, slots_per_row=slots_per_row)
            slots_per_row = 1
        return expert_product(x, self.weights, order, slots_per_row=slots_per_row, activation=activation)


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """Of inputs that become int8 first: each row by itself, or by its expert's own scale.

    scales, zeros: float32 and int32 [experts], or None.
    """

    weights: "ExpertRowWeights"
    is_symmetric: bool
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.weights.num_experts

    def tile_rows(self, num_slots: int) -> int:
        from headway_runtime.kernels.triton.expert_rows_product import row_tile_rows

        return row_tile_rows(self.weights, num_slots)

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        order: "ExpertOrder",
        *,
        slots_per_row: int,
        activation: Activation | None = None,
    ) -> Tensor:
        from headway_runtime.kernels.triton.expert_rows_product import expert_rows_product

        rows = self._coded(x, chosen, slots_per_row)
        if self.scales is not None:
            slots_per_row = 1
        return expert_rows_product(
            rows, self.weights, order, x.dtype, slots_per_row=slots_per_row, activation=activation
        )

    def _coded(self, x: Tensor, chosen: Tensor, slots_per_row: int) -> "CodedRows":
        from headway_runtime.kernels.triton.coded_rows import coded_rows
        from headway_runtime.kernels.triton.expert_inputs import coded_inputs

        if self.scales is None or self.zeros is None:
            return coded_rows(x, torch.int8, is_symmetric=self.is_symmetric)
        return coded_inputs(x, chosen, self.scales, self.zeros, slots_per_row=slots_per_row)


def product_of_experts(linears: Sequence[AnyLinear]) -> ExpertProduct | None:
    """Of one layer of each expert; None where they cannot be one as they are."""
    plain = [linear.weight for linear in linears if isinstance(linear, Linear) and linear.bias is None]
    if len(plain) == len(linears):
        return _of_plain(plain)
    coded = [linear for linear in linears if isinstance(linear, CodedLinear)]
    if len(coded) == len(linears):
        return _of_coded(coded)
    rows = [linear for linear in linears if isinstance(linear, CodedRowsLinear)]
    return _of_rows(rows) if len(rows) == len(linears) else None


def plain_product_of_experts(linears: Sequence[AnyLinear], dtype: torch.dtype) -> ExpertProduct | None:
    """The same with plain numbers, for inputs as they are. None for what has a bias."""
    weights = [_plain(linear, dtype) for linear in linears]
    found = [weight for weight in weights if weight is not None]
    return _of_plain(found) if len(found) == len(weights) else None


def _of_plain(weights: Sequence[Tensor]) -> NumberProduct:
    from headway_runtime.kernels.triton.expert_product import ExpertWeights

    num_outputs, num_inputs = weights[0].shape
    return NumberProduct(ExpertWeights(len(weights), num_outputs, num_inputs, torch.stack([*weights]), None))


def _of_coded(linears: Sequence[CodedLinear]) -> NumberProduct | None:
    from headway_runtime.kernels.triton.coded_weight import in_one_meaning
    from headway_runtime.kernels.triton.expert_product import stacked_codes

    weights = [linear.weight for linear in linears]
    orders = [linear.order for linear in linears if linear.order is not None]
    shapes = {(one.form, one.group_size, one.scale_rows, one.num_outputs, one.num_inputs) for one in weights}
    is_ordered = len(orders) == len(linears)
    if len(shapes) > 1 or (orders and not is_ordered) or any(linear.bias is not None for linear in linears):
        return None
    alike = in_one_meaning(weights)
    if alike is None:
        return None
    return NumberProduct(stacked_codes(alike), torch.stack(orders) if is_ordered else None)


def _of_rows(linears: Sequence[CodedRowsLinear]) -> IntegerProduct | None:
    from headway_runtime.kernels.triton.expert_rows_product import stacked_rows

    inputs = [linear.quantization for linear in linears if linear.quantization is not None]
    kinds = {(one.scale is None, one.is_symmetric) for one in inputs}
    shapes = {linear.weight.codes.shape for linear in linears}
    if len(inputs) < len(linears) or len(kinds) > 1 or len(shapes) > 1:
        return None
    if any(linear.bias is not None for linear in linears):
        return None
    weights = stacked_rows([linear.weight for linear in linears])
    return _with_inputs(weights, inputs)


def _with_inputs(weights: "ExpertRowWeights", inputs: Sequence[Int8Input]) -> IntegerProduct:
    scales = [one.scale for one in inputs if one.scale is not None]
    if not scales:
        return IntegerProduct(weights, inputs[0].is_symmetric)
    device = weights.codes.device
    return IntegerProduct(
        weights,
        inputs[0].is_symmetric,
        torch.tensor(scales, dtype=torch.float32, device=device),
        torch.tensor([one.zero for one in inputs], dtype=torch.int32, device=device),
    )


def _plain(linear: AnyLinear, dtype: torch.dtype) -> Tensor | None:
    """[outputs, inputs]; None with a bias, and for layers that only CPUs have."""
    match linear:
        case Linear():
            return linear.weight if linear.bias is None else None
        case SideBySideLinear():
            parts = [_plain(layer, dtype) for layer in linear.layers]
            found = [part for part in parts if part is not None]
            return torch.cat(found) if len(found) == len(parts) else None
        case TiledLinear() | CodedLinear() | CodedRowsLinear() if linear.bias is None:
            return linear.plain(dtype)
        case IntegerInputLinear() if linear.bias is None:
            return _plain(linear.inner, dtype)
    return None
