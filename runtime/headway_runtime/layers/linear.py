"""Linear layers: y = x @ weight.T (+ bias), with weights packed for the processor where that is possible.

Some CPUs have a kernel of our own, some of these one that reads weights in 12 bits. On others, oneDNN
reorders a bfloat16 weight once into the layout its kernels read; PyTorch exposes that for its own
compiler's use, so it is probed before it is relied on, and plain `F.linear` does the work elsewhere. Where
a CPU has no products of 16-bit numbers (bfloat16 before AVX-512, float16 nearly everywhere), PyTorch
multiplies them one by one: fast enough for a few rows, which wait for the weights, and some four times
slower than float32 for a prompt. There many rows meet tiles of the weight that are widened on the way
(`WideLinear`). On a GPU the few rows of a decode step have a kernel of our own (`ThinLinear`).
"""

from functools import cache
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.cpu_kernels import lossless_linear, pairs_linear
from headway_runtime.layers.kernel_choice import uses_triton

if TYPE_CHECKING:
    from headway_runtime.adapters.adapted_linear import AdaptedLinear
    from headway_runtime.kernels.cpu.grouped_linear import GroupedLinear
    from headway_runtime.kernels.cpu.integer_linear import IntegerLinear
    from headway_runtime.kernels.cpu.linear import PairsLinear
    from headway_runtime.kernels.cpu.lossless_linear import LosslessLinear
    from headway_runtime.layers.quantized_linear import QuantizedLinear

AnyLinear: TypeAlias = Union[
    "Linear",
    "PackedLinear",
    "PairsLinear",
    "LosslessLinear",
    "GroupedLinear",
    "IntegerLinear",
    "QuantizedLinear",
    "AdaptedLinear",
]

# The batch size that the packed layout is chosen for; it then serves all of them.
PACKED_FOR_ROWS = 16
# From so many rows on widening pays: measured with one thread at 4 to 8, whatever the sizes.
LEAST_WIDE_ROWS = 6
# Of a tile that is widened: 2 MiB as float32, what a core's cache holds, about.
WIDE_TILE_NUMBERS = 1 << 19


class Linear:
    """A plain linear layer. weight: [out, in]; bias: [out] or None."""

    __slots__ = ("bias", "num_inputs", "num_outputs", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class ThinLinear(Linear):
    """The same on a GPU, where few rows are multiplied by a kernel of our own.

    weight: contiguous. Rows come as [rows, inputs].
    """

    __slots__ = ("_thin",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from headway_runtime.kernels.triton.thin_product import ThinProduct

        super().__init__(weight, bias)
        self._thin = ThinProduct(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._thin(x) if len(x) <= self._thin.most_rows else super().__call__(x)


class WideLinear(Linear):
    """The same where products of this dtype are slow: many rows are multiplied in float32, tile by tile."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < LEAST_WIDE_ROWS:
            return super().__call__(x)
        wide, out = x.float(), x.new_empty((len(x), self.num_outputs))
        height = max(1, WIDE_TILE_NUMBERS // self.num_inputs)
        for first in range(0, self.num_outputs, height):
            rows = slice(first, first + height)
            out[:, rows] = functional.linear(wide, self.weight[rows].float())
        return out if self.bias is None else out.add_(self.bias)


class PackedLinear:
    """The same on a weight in oneDNN's layout, which replaces the original."""

    __slots__ = ("_apply", "bias", "num_inputs", "num_outputs", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self.bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._apply(x, self.weight, self.bias, "none", [], "")
        return result


def make_linear(parts: list[Tensor], bias: Tensor | None = None, *, compresses: bool = False) -> "AnyLinear":
    """The best linear layer for this weight's device and dtype. parts: its rows, one part below the other.

    compresses: where it can read fewer bits for the same results, it does.
    """
    # Interpreted, layers are as they are on a GPU.
    is_plain = uses_triton(parts[0].device)
    shorter = lossless_linear(parts, bias) if compresses and not is_plain else None
    if shorter is not None:
        return shorter
    ours = None if is_plain else pairs_linear(parts, bias)
    if ours is not None:
        return ours
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    if is_plain:
        return Linear(weight, bias) if weight.dtype == torch.float32 else ThinLinear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack():
        return PackedLinear(weight, bias)
    return Linear(weight, bias) if wide_dtype(weight) == weight.dtype else WideLinear(weight, bias)


def wide_dtype(x: Tensor) -> torch.dtype:
    """In which many rows of such a tensor are multiplied fastest: its own dtype, or float32."""
    is_slow = x.device.type == "cpu" and (
        (x.dtype == torch.bfloat16 and not can_pack()) or (x.dtype == torch.float16 and not _has_halves())
    )
    return torch.float32 if is_slow else x.dtype


@cache
def _has_halves() -> bool:
    """Whether this processor is known to multiply float16, or is not known at all."""
    try:
        from headway_runtime.kernels.cpu.processor import multiplies_halves
    except ImportError:
        return True
    return multiplies_halves()


@cache
def can_pack() -> bool:
    """Whether this PyTorch packs bfloat16 weights on this processor, and computes rightly with them."""
    x = torch.linspace(-1, 1, 3 * 32, dtype=torch.bfloat16).view(3, 32)
    weight = torch.linspace(1, -1, 48 * 32, dtype=torch.bfloat16).view(48, 32)
    try:
        packed = PackedLinear(weight, None)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(packed.float(), functional.linear(x.float(), weight.float()), rtol=2e-2, atol=2e-2)


def round_up(size: int, *, per_octave: int) -> int:
    """The next of `per_octave` evenly spaced sizes between two powers of two; small sizes are themselves.

    For numbers of rows, where each one costs a kernel (`PackedLinear`).
    """
    shift = max(0, (size - 1).bit_length() - per_octave.bit_length())
    return -(-size >> shift) << shift
