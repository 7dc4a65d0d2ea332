"""A weight of 4- or 8-bit codes in the order in which the products of `coded_product.py` read it.

int4 and int8 lie in words of 16 bits: word j of 32 holds the inputs j, 32 + j, 64 + j and 96 + j of 128 in
its nibbles, or j and 32 + j of 64 in its bytes, lowest first. So the codes of one place in 32 words are 32
inputs in their order: a tile of words becomes four or two tiles of numbers, register by register, and nothing
is shuffled.

Inputs are cut into blocks of 128, the last one filled up with codes that meet zeros. The words of one block
and neighbouring outputs lie side by side: [blocks, outputs, 32 words (4 bits) or 64 (8 bits)]. So whatever
number of outputs a program takes, one step of it reads one piece of memory from end to end (64 or 128 bytes
an output), in loads of 16 bytes each, and programs side by side read pieces side by side.

fp8 lies as in a checkpoint, [outputs, inputs], since products of codes with codes want it so as well: a step
reads a line of 128 bytes of each output.

What codes mean lies beside: [groups, outputs] words of 32 bits, a float32 scale, or a 16-bit scale with a
zero point above it, so that they come by the same asynchronous copies as the codes, which take no less than
4 bytes. Packed once when a model is loaded, by torch on any device. Knows nothing of checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

Form = Literal["int4", "int8", "fp8"]
Meaning = Literal["float32", "float16", "bfloat16"]

BLOCK_INPUTS = 128
LEAST_GROUP = 32
WORDS = 32
NIBBLE_ZERO = 8
LOWER_NIBBLE = 15
# Zero points that a code's distance from is exact in bfloat16.
MOST_ZERO = {"int4": 112, "int8": 128, "fp8": 0}
ZERO_SHIFT, LOWER_HALF = 16, 0xFFFF
HALVES: tuple[tuple[Meaning, torch.dtype], ...] = (("float16", torch.float16), ("bfloat16", torch.bfloat16))


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """codes: int16 [blocks, outputs, words of a block], or float8_e4m3fn [outputs, inputs].

    meanings: float32 scales or int32 words [groups, outputs / scale_rows, rounded up]. meaning: which, and
        which dtype the lower half of a word is.
    group_size: inputs of a group: 32, 64 or a multiple of 128; 0 where a group is all inputs. Others that 32
        divides, such as 96 or 192, lie as groups of 32 or 64 with equal meanings.
    scale_rows: outputs that share a meaning.
    """

    form: Form
    codes: Tensor
    meanings: Tensor
    meaning: Meaning
    group_size: int
    scale_rows: int
    num_outputs: int
    num_inputs: int

    @property
    def num_blocks(self) -> int:
        """Of 128 inputs."""
        return -(-self.num_inputs // BLOCK_INPUTS)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.meanings.nbytes


def coded_weight(
    form: Form,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor | None] = (),
    *,
    scale_rows: int = 1,
) -> CodedWeight | None:
    """Parts, one below the other; None where these products cannot do with them.

    codes: [outputs, inputs] int8 or float8_e4m3fn, or for int4 uint8 [outputs, inputs / 2] with even inputs
        in the low nibbles.
    scales: float32 [outputs / scale_rows, rounded up, groups], one for each equal group of inputs.
    zeros: as scales, or None for 8 (int4) or 0; empty for all None.
    """
    num_inputs = codes[0].shape[1] * (2 if form == "int4" else 1)
    group_size = _common_group([scale.shape[1] for scale in scales], num_inputs)
    if group_size is None or (form == "fp8" and num_inputs % 2):
        return None
    if any(part.shape[0] % scale_rows for part in codes[:-1]):
        counts = [len(part) for part in codes]
        scales = [
            scale.repeat_interleave(scale_rows, 0)[:count]
            for scale, count in zip(scales, counts, strict=True)
        ]
        scale_rows = 1
    num_groups = num_inputs // (group_size or num_inputs)
    merged = torch.cat([_in_groups(scale, num_groups) for scale in scales])
    points = _zeros(form, scales, zeros, num_groups)
    found = _meanings(form, merged, points)
    if found is None:
        return None
    meanings, meaning = found
    if form == "fp8":
        packed = torch.cat([part.view(torch.uint8) for part in codes]).view(torch.float8_e4m3fn)
    else:
        packed = torch.cat([_packed(form, part) for part in codes], dim=1)
    num_outputs = sum(len(part) for part in codes)
    num_blocks = -(-num_inputs // BLOCK_INPUTS)
    missing = 0 if not group_size else num_blocks * BLOCK_INPUTS // group_size - num_groups
    meanings = functional.pad(meanings.t(), (0, 0, 0, max(0, missing))).contiguous()
    return CodedWeight(form, packed, meanings, meaning, group_size, scale_rows, num_outputs, num_inputs)


def in_one_meaning(weights: Sequence[CodedWeight]) -> list[CodedWeight] | None:
    """The same weights with meanings of one kind, which each alone may have chosen differently; None where no
    kind says those of all. All of one form."""
    kinds: tuple[Meaning, ...] = ("float32", *(meaning for meaning, _ in HALVES))
    present = {weight.meaning for weight in weights}
    for meaning in sorted(kinds, key=lambda kind: kind not in present):
        said = [_with_meaning(weight, meaning) for weight in weights]
        found = [weight for weight in said if weight is not None]
        if len(found) == len(weights):
            return found
    return None


def _with_meaning(weight: CodedWeight, meaning: Meaning) -> CodedWeight | None:
    if weight.meaning == meaning:
        return weight
    usual = float(NIBBLE_ZERO if weight.form == "int4" else 0)
    if weight.meaning == "float32":
        scales, points = weight.meanings, torch.full_like(weight.meanings, usual)
    else:
        halves = weight.meanings.to(torch.int16).view(dict(HALVES)[weight.meaning])
        scales, points = halves.float(), (weight.meanings >> ZERO_SHIFT).float()
    if meaning == "float32":
        # What fills up the last block is scaled by 0, whatever it is.
        is_said = _holds((points == usual).logical_or(scales == 0))
        return replace(weight, meanings=scales, meaning=meaning) if is_said else None
    words = _words(scales, points, dict(HALVES)[meaning])
    return None if words is None else replace(weight, meanings=words, meaning=meaning)


def _common_group(counts: Sequence[int], num_inputs: int) -> int | None:
    """Inputs of a group when all parts have groups of the same size; 0: all inputs. None: no such product."""
    if any(num_inputs % count for count in counts):
        return None
    size = gcd(*(num_inputs // count for count in counts))
    if size == num_inputs:
        return 0
    if size % BLOCK_INPUTS:
        size = gcd(size, BLOCK_INPUTS)
    return size if size >= LEAST_GROUP else None


def _in_groups(values: Tensor, num_groups: int) -> Tensor:
    return values.repeat_interleave(num_groups // values.shape[1], 1)


def _zeros(
    form: Form, scales: Sequence[Tensor], zeros: Sequence[Tensor | None], num_groups: int
) -> Tensor | None:
    """float32 [outputs, groups]; None where all are what no zero point stands for."""
    usual = float(NIBBLE_ZERO if form == "int4" else 0)
    if all(zero is None or bool((zero == usual).all()) for zero in zeros):
        return None
    pairs = zip(scales, zeros, strict=True)
    own = [torch.full_like(scale, usual) if zero is None else zero.float() for scale, zero in pairs]
    return torch.cat([_in_groups(zero, num_groups) for zero in own])


def _meanings(form: Form, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Meaning] | None:
    """[outputs, groups]; None for zeros that are no small whole numbers, or scales too fine for words."""
    if form != "int4" and zeros is None:
        return scales.float().contiguous(), "float32"
    points = torch.full_like(scales, NIBBLE_ZERO) if zeros is None else zeros
    if not _holds((points == points.round()).logical_and(points.abs() <= MOST_ZERO[form])):
        return None
    for meaning, dtype in HALVES:
        words = _words(scales, points, dtype)
        if words is not None:
            return words, meaning
    return (scales.float().contiguous(), "float32") if zeros is None else None


def _words(scales: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor | None:
    """int32: a scale of that type in the lower half, a zero point above; None where it is not exact."""
    halves = scales.to(dtype)
    if not _holds(halves.float() == scales.float()):
        return None
    return (halves.contiguous().view(torch.int16).int() & LOWER_HALF) | (points.int() << ZERO_SHIFT)


def _holds(conditions: Tensor) -> bool:
    """Whether all are true; of numbers that are not there it is assumed, as it mostly is."""
    return conditions.is_meta or bool(conditions.all())


def _packed(form: Form, codes: Tensor) -> Tensor:
    """int16 [blocks, outputs, words of a block] of nibbles or bytes."""
    outputs, bits = len(codes), 4 if form == "int4" else 8
    if form == "int4":
        codes = torch.stack((codes & LOWER_NIBBLE, codes >> 4), dim=-1).flatten(1)
    codes = functional.pad(codes.view(torch.uint8), (0, -codes.shape[1] % BLOCK_INPUTS))
    planes = codes.view(outputs, -1, BLOCK_INPUTS * bits // 16 // WORDS, 16 // bits, WORDS).short()
    shifts = torch.arange(0, 16, bits, device=codes.device, dtype=torch.int16)
    words = (planes << shifts[:, None]).sum(3, dtype=torch.int16).flatten(2)
    return words.transpose(0, 1).contiguous()
