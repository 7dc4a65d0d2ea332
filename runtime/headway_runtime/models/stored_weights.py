"""Reads one module's quantized tensors, as a scheme says that they lie there, into weights in memory.

Four layouts are known. AWQ and GPTQ pack numbers across outputs and inputs of transposed weights, so that one
group's scales lie side by side; llm-compressor packs along inputs, or not at all. Every tensor is checked for
its dtype and shape; nothing is converted that could be kept as it is.
"""

from typing import Protocol

import torch
from torch import Tensor

from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8GroupWeight,
    Int8Input,
    Int8Weight,
    QuantizedWeight,
    holds_no_numbers,
    packed_nibbles,
    unpacked_nibbles,
)
from headway_runtime.models.group_order import consistent_order
from headway_runtime.quantization.scheme import Scheme

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# What is said of a tensor.
NOT_FINITE = "holds numbers that are infinite or none; copy or quantize the model anew"
ALL_ZERO = (
    "holds scales that are 0 throughout, which would make every weight 0; copy or quantize the model anew"
)
LOST_ZEROS = (
    "holds zero points that AutoGPTQ overwrote where it stored 0 less 1 (checkpoint_format='gptq'), unless "
    "GPTQModel wrote them, which meta.quantizer would say; quantize the model anew with GPTQModel"
)
FLOAT8_SCALES = (*FLOATS, torch.float8_e8m0fnu)
WORD_BITS = 32
# Which column of eight lies in each 4 bits of AutoAWQ's words, lowest first.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# What tells that a module is quantized.
WEIGHT_NAMES = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "plain": "weight"}


class StoredTensors(Protocol):
    """A checkpoint's tensors as they lie there. Errors name the file."""

    def holds(self, name: str) -> bool: ...

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """The tensor of that name, of one of these dtypes and shapes. ModelLoadError if it is not there."""

    def error(self, name: str, complaint: str) -> ModelLoadError:
        """An error about the tensor of that name."""


def read_stored(
    tensors: StoredTensors, module: str, outputs: int, inputs: int, scheme: Scheme
) -> QuantizedWeight:
    """The weight of one module. ModelLoadError for what is missing or does not fit."""
    reader = _Reader(tensors, module, outputs, inputs, scheme)
    reader.check_sizes()
    if scheme.is_float:
        return reader.fp8()
    match scheme.layout:
        case "gptq":
            return reader.gptq()
        case "awq":
            return reader.awq()
        case "packed":
            return reader.packed()
        case "plain":
            return reader.plain()


class _Reader:
    """One module's tensors on their way into memory."""

    def __init__(
        self, tensors: StoredTensors, module: str, outputs: int, inputs: int, scheme: Scheme
    ) -> None:
        self._tensors, self._module, self._scheme = tensors, module, scheme
        self._outputs, self._inputs = outputs, inputs
        self._group_size = scheme.group_size or inputs
        self._groups = inputs // self._group_size
        self._per_word = WORD_BITS // scheme.bits
        self._zero = 1 << (scheme.bits - 1)

    def check_sizes(self) -> None:
        name = f"{self._module}.{WEIGHT_NAMES[self._scheme.layout]}"
        if self._inputs % self._group_size:
            raise self._tensors.error(
                name,
                f"its {self._inputs} inputs are no multiple of group_size={self._group_size}; quantize the "
                "model anew with a size that divides them",
            )
        per_word = {"gptq": (self._inputs, self._outputs), "awq": (self._outputs,), "packed": (), "plain": ()}
        if any(size % self._per_word for size in per_word[self._scheme.layout]):
            raise self._tensors.error(
                name,
                f"{self._outputs} outputs and {self._inputs} inputs do not fill words of {self._per_word} "
                "numbers; serve the model without quantization",
            )
        if self._scheme.form == "int4" and self._inputs % 2:
            raise self._tensors.error(
                name, f"an odd number of inputs, {self._inputs}; serve the model without quantization"
            )

    def gptq(self) -> QuantizedWeight:
        codes = self._take("qweight", (torch.int32,), (self._inputs // self._per_word, self._outputs))
        words = self._take("qzeros", (torch.int32,), (self._groups, self._outputs // self._per_word))
        # A word's bytes are 4 or 8 inputs of one output in their order.
        rows = codes.view(torch.uint8).view(-1, self._outputs, 4).permute(1, 0, 2).flatten(1)
        scales = self._scales((self._groups, self._outputs)).t()
        return self._grouped(rows, scales, self._gptq_zeros(words).t(), "g_idx")

    def _gptq_zeros(self, words: Tensor) -> Tensor:
        """Zero points [groups, outputs] of their words, in which each may be stored less 1.

        GPTQModel takes 1 off all numbers of a word at once, so that 0 borrows from the next number: adding
        whole words undoes that. AutoGPTQ takes it off each, and where that makes -1 sets all higher bits of
        the word: two or more numbers of nothing but ones at a word's end say that some are lost.
        """
        scheme = self._scheme
        if scheme.zero_offset:
            if not (scheme.zeros_borrow or scheme.is_symmetric) and bool(
                (words >> (WORD_BITS - 2 * scheme.bits) == -1).any()
            ):
                raise self._error("qzeros", LOST_ZEROS)
            # Carries and all.
            words = words + sum(scheme.zero_offset << shift for shift in self._shifts())
        zeros = self._unpacked(words)
        if scheme.is_symmetric and not bool((zeros == self._zero).all()):
            found = sorted(set(zeros.flatten().tolist()) - {self._zero})[:3]
            other = "'gptq_v2'" if scheme.zero_offset else "'gptq'"
            raise self._error(
                "qzeros",
                f"holds zero points such as {found}, though sym=true means {self._zero}; checkpoint_format "
                f"may have to be {other}, or sym false: correct the one that is wrong",
            )
        return zeros

    def awq(self) -> QuantizedWeight:
        words = self._outputs // self._per_word
        codes = self._unpacked(self._take("qweight", (torch.int32,), (self._inputs, words)), AWQ_COLUMNS)
        scales = self._scales((self._groups, self._outputs)).t()
        zeros = torch.full_like(scales, self._zero)
        if not self._scheme.is_symmetric or self._holds("qzeros"):
            stored = self._take("qzeros", (torch.int32,), (self._groups, words))
            zeros = self._unpacked(stored, AWQ_COLUMNS).t()
            if self._scheme.is_symmetric and not bool((zeros == self._zero).all()):
                raise self._error(
                    "qzeros",
                    "holds zero points, though the configuration says zero_point=false; correct either",
                )
        return self._grouped(packed_nibbles(codes.t()), scales, zeros, None)

    def packed(self) -> QuantizedWeight:
        """Words along inputs; numbers and zero points are stored without sign."""
        words = -(-self._inputs // self._per_word)
        codes = self._take("weight_packed", (torch.int32,), (self._outputs, words))
        if self._holds("weight_shape"):
            shape = self._take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
            if shape != [self._outputs, self._inputs]:
                raise self._error(
                    "weight_shape", f"says {shape!r}, config.json asks for {[self._outputs, self._inputs]!r}"
                )
        per_row = self._inputs * self._scheme.bits // 8
        rows = codes.contiguous().view(torch.uint8)[:, :per_row]
        scales = self._scales(*self._scale_shapes(), name="weight_scale").view(-1, self._scale_groups())
        zeros = torch.full_like(scales, self._zero)
        if not self._scheme.is_symmetric:
            shape_of_zeros = (-(-len(scales) // self._per_word), self._scale_groups())
            stored = self._take("weight_zero_point", (torch.int32,), shape_of_zeros)
            zeros = self._unpacked(stored.t()).t()[: len(scales)]
        return self._grouped(rows, self._for_outputs(scales), self._for_outputs(zeros), "weight_g_idx")

    def plain(self) -> QuantizedWeight:
        """A number each, with sign."""
        codes = self._take("weight", (torch.int8,), (self._outputs, self._inputs))
        scales = self._scales(*self._scale_shapes(), name="weight_scale").view(-1, self._scale_groups())
        if self._scheme.form == "int8":
            return Int8Weight(codes, self._for_outputs(scales).flatten().contiguous(), self._input())
        zeros = torch.zeros_like(scales)
        if not self._scheme.is_symmetric:
            stored = self._take("weight_zero_point", (torch.int8, torch.int32), *self._scale_shapes())
            zeros = stored.float().view(-1, self._scale_groups())
        unsigned = codes.to(torch.int16) + self._zero
        if self._scheme.bits == 4:
            if bool(((unsigned < 0) | (unsigned >= 2 * self._zero)).any()):
                raise self._error("weight", "holds numbers that need more than 4 bits; correct num_bits")
            unsigned = packed_nibbles(unsigned)
        return self._grouped(
            unsigned.to(torch.uint8),
            self._for_outputs(scales),
            self._for_outputs(zeros) + self._zero,
            "weight_g_idx",
        )

    def fp8(self) -> Fp8Weight:
        codes = self._take("weight", (torch.float8_e4m3fn,), (self._outputs, self._inputs))
        if holds_no_numbers(codes):
            raise self._error(
                "weight",
                "holds FP8 codes that are no numbers (0x7F or 0xFF); copy or quantize the model anew",
            )
        name = "weight_scale_inv" if self._holds("weight_scale_inv") else "weight_scale"
        scales = self._scales(*self._scale_shapes(), name=name)
        if self._scheme.has_input_scale:
            self._finite("input_scale", self._take("input_scale", FLOATS, (), (1,)))
        elif self._holds("input_scale"):
            self._take("input_scale", FLOATS, (), (1,))
        match self._scheme.strategy:
            case "block":
                return Fp8Weight(codes, scales, self._scheme.block)
            case "group":
                return Fp8Weight(codes, scales, (1, self._group_size))
            case _:
                return Fp8Weight(codes, self._for_outputs(scales.view(-1, 1)).flatten().contiguous())

    # Parts of these.

    def _grouped(
        self, rows: Tensor, scales: Tensor, zeros: Tensor, order_name: str | None
    ) -> QuantizedWeight:
        """rows: uint8 [outputs, bytes]; scales and zeros: [outputs, groups]."""
        order: Tensor | None = None
        if order_name is not None and (self._scheme.has_input_order or self._holds(order_name)):
            groups_of = self._take(order_name, (torch.int32, torch.int64), (self._inputs,))
            try:
                order = consistent_order(
                    groups_of, self._group_size, has_own_order=self._scheme.has_input_order
                )
            except ValueError as error:
                raise self._error(order_name, str(error)) from error
        scales, zeros = scales.float().contiguous(), zeros.float().contiguous()
        if self._scheme.bits == 8:
            codes = (rows if order is None else rows.index_select(1, order)).contiguous().view(torch.int8)
            # From codes without sign to codes with one.
            codes, zeros = codes ^ torch.iinfo(torch.int8).min, zeros - self._zero
            return Int8GroupWeight(
                codes, scales, zeros if bool(zeros.any()) else None, self._group_size, order
            )
        codes = rows if order is None else packed_nibbles(unpacked_nibbles(rows).index_select(1, order))
        has_zeros = bool((zeros != self._zero).any())
        return Int4Weight(codes.contiguous(), scales, zeros if has_zeros else None, self._group_size, order)

    def _scale_groups(self) -> int:
        return self._groups if self._scheme.strategy == "group" else 1

    def _scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        scheme = self._scheme
        match scheme.strategy:
            case "tensor":
                return (), (1,), (1, 1)
            case "channel":
                own = ((self._outputs, 1), (self._outputs,))
                # FP8 checkpoints do not say whether outputs have their own.
                return (*own, (), (1,), (1, 1)) if scheme.is_float else own
            case "group":
                return ((self._outputs, self._groups),)
            case "block":
                assert scheme.block is not None
                rows, columns = scheme.block
                return ((-(-self._outputs // rows), -(-self._inputs // columns)),)

    def _scales(self, *shapes: tuple[int, ...], name: str = "scales") -> Tensor:
        scales = self._finite(
            name, self._take(name, FLOAT8_SCALES if self._scheme.is_float else FLOATS, *shapes)
        )
        # Groups whose weights are all 0 may have a scale of 0; a whole module of them is damage.
        if not bool(scales.any()):
            raise self._error(name, ALL_ZERO)
        return scales

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.float()
        if not bool(torch.isfinite(tensor).all()):
            raise self._error(name, NOT_FINITE)
        return tensor

    def _for_outputs(self, values: Tensor) -> Tensor:
        """[outputs, groups] of those or [1, groups]."""
        return values.expand(self._outputs, -1)

    def _input(self) -> Int8Input | None:
        scheme = self._scheme.input
        if scheme is None:
            return None
        if scheme.is_dynamic:
            return Int8Input(is_symmetric=scheme.is_symmetric)
        scale = self._finite("input_scale", self._take("input_scale", FLOATS, (), (1,), (1, 1))).item()
        if scale <= 0:
            raise self._error(
                "input_scale", f"holds {scale!r}, which is not positive; quantize the model anew"
            )
        zero = 0
        if not scheme.is_symmetric or self._holds("input_zero_point"):
            zero = int(self._take("input_zero_point", (torch.int8, torch.int32), (), (1,), (1, 1)).item())
        return Int8Input(scale, zero, is_symmetric=scheme.is_symmetric)

    def _shifts(self) -> range:
        return range(0, WORD_BITS, self._scheme.bits)

    def _unpacked(self, words: Tensor, columns: tuple[int, ...] | None = None) -> Tensor:
        """uint8 [rows, numbers] of int32 [rows, words]. columns: which number of a word each place holds."""
        numbers = words.contiguous().view(torch.uint8)
        if self._scheme.bits == 4:
            numbers = unpacked_nibbles(numbers)
        if columns is not None:
            places = torch.tensor(columns, device=words.device).argsort()
            numbers = numbers.view(len(words), -1, len(columns)).index_select(2, places).flatten(1)
        return numbers

    def _take(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        return self._tensors.take_stored(f"{self._module}.{name}", dtypes, *shapes)

    def _holds(self, name: str) -> bool:
        return self._tensors.holds(f"{self._module}.{name}")

    def _error(self, name: str, complaint: str) -> ModelLoadError:
        return self._tensors.error(f"{self._module}.{name}", complaint)
