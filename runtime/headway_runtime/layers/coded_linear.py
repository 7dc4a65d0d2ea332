"""Linear layers of 4- and 8-bit codes on a GPU: which product multiplies how many rows.

Few rows wait for the weight's bytes, so its codes are read as they are and x stays as it is. Many wait for
arithmetic: fp8 multiplies x as fp8 too where the GPU can (twice the rate of bfloat16), anything else becomes
plain numbers for cuBLAS. From how many rows on is said by the table of configurations. A weight lies in
memory once, whichever product reads it.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
    in_own_order,
)
from headway_runtime.model_config import Activation

if TYPE_CHECKING:
    from headway_runtime.kernels.triton.coded_rows_product import RowWeight
    from headway_runtime.kernels.triton.coded_weight import CodedWeight

# What `torch._scaled_mm` takes: sizes are multiples of this, and results are bfloat16.
SCALED_PRODUCT_MULTIPLE = 16

ManyRows = Callable[[Tensor], Tensor]
Weight = TypeVar("Weight", bound=QuantizedWeight)


class CodedLinear:
    """Codes times x as it is; `many` multiplies more than `most_rows` rows."""

    __slots__ = ("_many", "_product", "bias", "most_rows", "num_inputs", "num_outputs", "order")

    def __init__(self, weight: "CodedWeight", bias: Tensor | None, order: Tensor | None) -> None:
        """order: int64 [inputs], by which x is permuted first."""
        from headway_runtime.kernels.triton.coded_plain import most_product_rows
        from headway_runtime.kernels.triton.coded_product import CodedProduct

        self.num_outputs, self.num_inputs = weight.num_outputs, weight.num_inputs
        self.order, self.bias = order, bias
        self._product = CodedProduct(weight, bias)
        self._many: ManyRows = PlainProduct(weight, bias)
        self.most_rows = most_product_rows(weight)

    def multiplies_many_by(self, many: ManyRows) -> None:
        self._many = many

    @property
    def weight(self) -> "CodedWeight":
        return self._product.weight

    def plain(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], for inputs in the model's own order."""
        from headway_runtime.kernels.triton.coded_plain import coded_plain

        return in_own_order(coded_plain(self.weight, dtype), self.order)

    def wanted_codes(self, num_rows: int) -> torch.dtype | None:
        """See row_codes.py."""
        multiplies_codes = isinstance(self._many, ScaledProduct) and self.order is None
        return torch.float8_e4m3fn if multiplies_codes and num_rows > self.most_rows else None

    def of_codes(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """codes: as they were wanted [rows, inputs]. scales: float32 [rows]. dtype: of the result."""
        assert isinstance(self._many, ScaledProduct)
        assert dtype == torch.bfloat16
        return self._many.of_codes(codes, scales)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Of a merged gate and up projection, activation(gate) * up. x: no more than `most_rows` rows."""
        return self._product(self._ordered(x), activation)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)

    def __call__(self, x: Tensor) -> Tensor:
        x = self._ordered(x)
        return self._product(x) if len(x) <= self.most_rows else self._many(x)


class PlainProduct:
    """The weight's plain numbers, made for each product, times x."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: "CodedWeight", bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        from headway_runtime.kernels.triton.coded_plain import coded_plain

        return functional.linear(x, coded_plain(self._weight, x.dtype), self._bias)


class ScaledProduct:
    """fp8 times x as fp8 with a scale of each row, by PyTorch's own product."""

    __slots__ = ("_bias", "_codes", "_scales")

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """codes: float8_e4m3fn [outputs, inputs]. scales: float32 [outputs]. bias: bfloat16."""
        self._codes, self._scales, self._bias = codes.t(), scales.unsqueeze(0), bias

    def __call__(self, x: Tensor) -> Tensor:
        from headway_runtime.kernels.triton.coded_rows import coded_rows

        rows = coded_rows(x, torch.float8_e4m3fn)
        return self.of_codes(rows.codes, rows.scales)

    def of_codes(self, codes: Tensor, scales: Tensor) -> Tensor:
        # Without fast accumulation: sums of 14 bits lose what is far back in long contexts.
        result: Tensor = torch._scaled_mm(
            codes,
            self._codes,
            scale_a=scales.unsqueeze(1),
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )
        return result


class CodedRowsLinear:
    """x becomes 8-bit codes first: int8 as its quantization says, or fp8 with a scale of each 128 inputs."""

    __slots__ = ("_product", "bias", "num_inputs", "num_outputs", "quantization")

    def __init__(self, weight: "RowWeight", bias: Tensor | None, quantization: Int8Input | None) -> None:
        """quantization: of x as int8; None for fp8."""
        from headway_runtime.kernels.triton.coded_rows_product import CodedRowsProduct

        self._product = CodedRowsProduct(weight, bias)
        self.num_outputs, self.num_inputs = self._product.num_outputs, self._product.num_inputs
        self.quantization, self.bias = quantization, bias

    @property
    def weight(self) -> "RowWeight":
        return self._product.weight

    def plain(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], of int8."""
        weight = self.weight
        return (weight.codes.float() * weight.scales[:, None]).to(dtype)

    def wanted_codes(self, num_rows: int) -> torch.dtype | None:
        """See row_codes.py."""
        own = self.quantization
        return torch.int8 if own is not None and own.scale is None and own.is_symmetric else None

    def of_codes(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """codes: as they were wanted [rows, inputs]. scales: float32 [rows]. dtype: of the result."""
        from headway_runtime.kernels.triton.coded_rows import CodedRows

        return self._product(CodedRows(codes, scales, None), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        from headway_runtime.kernels.triton.coded_rows import coded_rows

        own = self.quantization
        if own is None:
            return self._product(coded_rows(x, torch.float8_e4m3fn, in_groups=True), x.dtype)
        given = None if own.scale is None else (own.scale, own.zero)
        return self._product(coded_rows(x, torch.int8, is_symmetric=own.is_symmetric, given=given), x.dtype)


def make_coded_linear(
    parts: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype
) -> CodedLinear | CodedRowsLinear | None:
    """Parts alike of one weight, one below the other; None where no kernel can do with them."""
    if int8 := _of(Int8Weight, parts):
        if int8[0].input is not None:
            return _integer_linear(int8, bias, int8[0].input)
        return _linear("int8", int8, [part.scales.unsqueeze(1) for part in int8], bias)
    if groups := _of(Int8GroupWeight, parts):
        return _linear("int8", groups, [part.scales for part in groups], bias)
    if int4 := _of(Int4Weight, parts):
        return _linear("int4", int4, [part.scales for part in int4], bias)
    return _fp8_linear(_of(Fp8Weight, parts), bias, dtype)


def _of(kind: type[Weight], parts: Sequence[QuantizedWeight]) -> list[Weight]:
    return [part for part in parts if isinstance(part, kind)]


def _linear(
    form: str,
    parts: Sequence[Int8Weight | Int8GroupWeight | Int4Weight],
    scales: Sequence[Tensor],
    bias: Tensor | None,
) -> CodedLinear | None:
    from headway_runtime.kernels.triton.coded_weight import coded_weight

    grouped = [part for part in parts if not isinstance(part, Int8Weight)]
    weight = coded_weight(
        "int4" if form == "int4" else "int8",
        [part.codes for part in parts],
        scales,
        [part.zeros for part in grouped],
    )
    order = grouped[0].input_order if grouped else None
    return None if weight is None else CodedLinear(weight, bias, order)


def _integer_linear(
    parts: Sequence[Int8Weight], bias: Tensor | None, quantization: Int8Input
) -> CodedRowsLinear | None:
    from headway_runtime.kernels.triton.coded_rows import can_code
    from headway_runtime.kernels.triton.coded_rows_product import RowWeight

    if not can_code(parts[0].shape[1]):
        return None
    codes = torch.cat([part.codes for part in parts])
    has_zeros = quantization.scale is not None or not quantization.is_symmetric
    sums = codes.sum(1, dtype=torch.int32) if has_zeros else None
    weight = RowWeight(codes, torch.cat([part.scales for part in parts]), sums)
    return CodedRowsLinear(weight, bias, quantization)


def _fp8_linear(parts: Sequence[Fp8Weight], bias: Tensor | None, dtype: torch.dtype) -> CodedLinear | None:
    """Of parts whose blocks are alike, or that have none."""
    from headway_runtime.kernels.triton.coded_weight import coded_weight

    block = parts[0].block
    num_outputs, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if any(part.block != block for part in parts):
        return None
    scales = [part.scales if block is not None else part.scales.unsqueeze(1) for part in parts]
    codes = [part.codes for part in parts]
    weight = coded_weight(
        "fp8",
        codes,
        scales if block is None else [_of_equal_groups(scale, block[1], num_inputs) for scale in scales],
        scale_rows=1 if block is None else block[0],
    )
    if weight is None:
        return None
    linear = CodedLinear(weight, bias, None)
    many = _fp8_rows(weight, scales, bias, dtype, (num_outputs, num_inputs), block)
    if many is not None:
        linear.multiplies_many_by(many)
    return linear


def _of_equal_groups(scales: Tensor, width: int, num_inputs: int) -> Tensor:
    """Scales of blocks of so many inputs, the last one cut off, as those of groups that divide all inputs."""
    size = gcd(width, num_inputs)
    return scales.repeat_interleave(width // size, 1)[:, : num_inputs // size]


def _fp8_rows(
    weight: "CodedWeight",
    scales: Sequence[Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
) -> ManyRows | None:
    """A product with x as fp8, or None where there is none for these sizes or on this GPU."""
    from headway_runtime.kernels.triton.coded_rows import GROUP, can_code
    from headway_runtime.kernels.triton.coded_rows_product import RowWeight, can_multiply_fp8
    from headway_runtime.kernels.triton.launch import gpu_of

    num_outputs, num_inputs = shape
    if not can_multiply_fp8(gpu_of(weight.codes.device)) or not can_code(num_inputs):
        return None
    if block is None:
        fits = num_outputs % SCALED_PRODUCT_MULTIPLE == 0 and num_inputs % SCALED_PRODUCT_MULTIPLE == 0
        if dtype != torch.bfloat16 or not fits:
            return None
        return ScaledProduct(weight.codes, torch.cat([*scales]).squeeze(1), bias)
    if block != (GROUP, GROUP) or weight.scale_rows != GROUP or num_inputs % GROUP:
        return None
    return CodedRowsLinear(RowWeight(weight.codes, torch.cat([*scales]).contiguous()), bias, None)
