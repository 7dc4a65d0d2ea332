"""A mixture of experts: a router chooses a few MLPs for each token, and their results are added up.

Tokens are sorted by expert, so that each expert that any token wants makes one product of all of them; no
work is done token by token. Probabilities and sums are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_runtime.kernels.triton.row_codes import RowCodes
from headway_runtime.layers import gpu_kernels
from headway_runtime.layers.cpu_kernels import weighted_sum
from headway_runtime.layers.gate import Gate
from headway_runtime.layers.linear import AnyLinear, PackedLinear, round_up
from headway_runtime.layers.row_codes import Rows, product_of, wanted_codes

# Tokens whose results PyTorch adds up at once: what that takes in float32 then stays small.
ROWS_AT_ONCE = 256
# Where each number of rows costs a kernel (see step_inputs.py), there are so many between two powers of two.
SIZES_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate) * up), the middle's projections merged."""

    gate_up: AnyLinear
    gate: Gate
    down: AnyLinear

    def __call__(self, x: Rows) -> Tensor:
        """x: [rows, hidden_size], as codes where they are wanted."""
        codes = wanted_codes(self.down, len(x.codes) if isinstance(x, RowCodes) else len(x))
        return product_of(self.down, self.gate.of_product(self.gate_up, x, codes))

    def wanted_codes(self, num_rows: int) -> torch.dtype | None:
        """See row_codes.py."""
        return wanted_codes(self.gate_up, num_rows)

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        """In the order of their work."""
        return self.gate_up, self.down


class Experts:
    """router: hidden states to a logit of each expert. num_used: how many a token goes through.

    normalizes: whether the probabilities of those are divided by their sum.
    """

    __slots__ = ("_experts", "_fused", "_normalizes", "_num_used", "_router", "_rows_of", "_sum")

    def __init__(
        self,
        router: AnyLinear,
        experts: list[GatedMLP],
        num_used: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        normalizes: bool,
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_used = num_used
        self._normalizes = normalizes
        self._sum = weighted_sum(router.num_inputs, num_used, dtype, device)
        rounds = any(isinstance(linear, PackedLinear) for linear in experts[0].linears)
        self._rows_of: Callable[[int], int] = _rounded if rounds else _exactly
        # Where they are one, the single ones are let go of.
        self._fused = gpu_kernels.fused_experts(
            [expert.gate_up for expert in experts],
            [expert.down for expert in experts],
            experts[0].gate.activation,
            num_used,
            dtype,
            device,
            normalizes=normalizes,
        )
        if self._fused is not None:
            self._experts = []

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        """Router first, then each expert's in the order of their work, unless all are one."""
        return self._router, *(linear for expert in self._experts for linear in expert.linears)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, hidden_size]."""
        if self._fused is not None:
            return self._fused(x, self._router(x))
        weights, chosen = self._route(x)
        # Places in `chosen`, those of the first expert first.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        results = self._by_expert(x.index_select(0, order // self._num_used), counts)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return self._added_up(results, places.view(chosen.shape), weights)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in float32, and experts: each [rows, num_used]."""
        probabilities = self._router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._num_used, dim=-1)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _added_up(self, results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """results: of each place. places, weights: of each token's own, [rows, num_used]."""
        if self._sum is not None:
            return self._sum(results, places, weights)
        out = results.new_empty((len(places), results.shape[1]))
        pieces = (torch.split(part, ROWS_AT_ONCE) for part in (out, places, weights))
        for rows, own, shares in zip(*pieces, strict=True):
            of_tokens = results.index_select(0, own.flatten()).view(*own.shape, results.shape[1])
            rows.copy_(of_tokens.mul(shares.unsqueeze(-1)).sum(1))
        return out

    def _by_expert(self, x: Tensor, counts: list[int]) -> Tensor:
        """x: rows in the order of their experts. counts: rows of each expert."""
        results, start = torch.empty_like(x), 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                end = start + count
                # Rows of the next experts may follow; what this one makes of them is nobody's.
                results[start:end] = expert(x[start : start + self._rows_of(count)])[:count]
                start = end
        return results


def _exactly(count: int) -> int:
    return count


def _rounded(count: int) -> int:
    return round_up(count, per_octave=SIZES_PER_OCTAVE)
