"""Bytes of one linear layer's weight: codes, scales, zero points, and the room that a kernel's layout adds.

The layouts are those of `layers.quantized_weights` and, for CPU kernels, of `kernels.cpu.strips`; tests hold
this against what an engine really allocates.
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

from headway_runtime.fit.placement import Placement
from headway_runtime.quantization.choice import Online
from headway_runtime.quantization.scheme import Form, Scheme

Kind = Literal["plain"] | Form

SCALE_BYTES = 4
# Of `kernels.triton.coded_weight`: a scale and its zero point.
GPU_MEANING_BYTES, GPU_BLOCK_INPUTS, LEAST_GPU_GROUP = 4, 128, 32
ORDER_BYTES = 8
# Of PyTorch's product of 4-bit weights: a scale and what the middle code means, both bfloat16.
TORCH_INT4_GROUPS, TORCH_INT4_SCALE_BYTES = (32, 64, 128, 256), 4
# Of `layers.quantizer`: inputs that share a scale in weights that are quantized at load.
ONLINE_INT4_GROUPS = (128, 64, 32)
# Of `kernels.cpu.strips` and `coded_linear`.
PANEL = 16
VECTOR_BYTES = 64
MOST_PANELS = 4
MOST_GROUP_INPUTS = 256
FEW_INPUTS_PER_SCALE = 128
# Of `kernels.cpu.lossless_codes`. A weight without a code has a patch, with its number and its step's: one of
# so many, where they are normally distributed.
STEP_INPUTS, COMPRESSED_GROUP_INPUTS = 8, 256
LONG_BYTES = 4
WEIGHTS_PER_PATCH, PATCH_BYTES = 6_000, 12
INPUTS_PER_VECTOR = {"int4": 8, "int8": 4, "int8 group": 4, "fp8": 4}


@dataclass(frozen=True, slots=True)
class Kept:
    """How a weight is kept. group: inputs that share a scale, None for all of an output's.

    block: rows and columns that do. has_halves: whether float16 says its scales exactly.
    """

    kind: Kind
    group: int | None = None
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    has_order: bool = False
    has_halves: bool = False


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """numbers: of the weight's own; extra: scales, zero points and orders, and what alignment adds."""

    numbers: int
    extra: int = 0

    @property
    def total(self) -> int:
        return self.numbers + self.extra


def kept_of(how: Scheme | Online | None, inputs: int) -> Kept:
    """What weights with so many inputs become. how: of `Quantization.of_module`."""
    match how:
        case None:
            return Kept("plain")
        case "int8" | "fp8":
            return Kept(how)
        case "int4":
            group = next((size for size in ONLINE_INT4_GROUPS if inputs % size == 0), inputs)
            return Kept("int4", group, has_halves=True)
    block = how.block
    if how.is_float and how.strategy == "group" and how.group_size is not None:
        block = (1, how.group_size)
    return Kept(
        how.form,
        None if how.is_float else how.group_size,
        block,
        has_zeros=not how.is_symmetric and how.form in ("int4", "int8 group"),
        has_order=how.has_input_order,
        # Tools store float16, or bfloat16 in its range.
        has_halves=how.form in ("int4", "int8 group"),
    )


def linear_bytes(outputs: list[int], inputs: int, kept: Kept, placement: Placement) -> LinearBytes:
    """Of parts alike, one below the other."""
    numbers = sum(outputs) * inputs
    if kept.kind == "plain" and is_compressed(outputs, inputs, placement):
        return _compressed_bytes(outputs, inputs, placement)
    if kept.kind == "plain":
        return LinearBytes(numbers * placement.number_bytes)
    codes = numbers // 2 if kept.kind == "int4" else numbers
    total = _strip_bytes(outputs, inputs, kept, placement) if placement.has_strips else None
    if total is None:
        total = codes + sum(_scale_bytes(own, inputs, kept, placement) for own in outputs)
    return LinearBytes(codes, total - codes + (ORDER_BYTES * inputs if kept.has_order else 0))


def is_compressed(outputs: list[int], inputs: int, placement: Placement) -> bool:
    """Whether plain numbers lie in 12 bits each, unless they have too many magnitudes."""
    return placement.compresses and inputs % STEP_INPUTS == 0 and not any(own % PANEL for own in outputs)


def _compressed_bytes(outputs: list[int], inputs: int, placement: Placement) -> LinearBytes:
    numbers = sum(outputs) * inputs
    panels = _panels_of_strip([own // PANEL for own in outputs], placement.num_threads)
    num_strips = sum(outputs) // (panels * PANEL)
    of_strip = VECTOR_BYTES + -(-inputs // COMPRESSED_GROUP_INPUTS) * LONG_BYTES
    return LinearBytes(numbers * 3 // 2, num_strips * of_strip + numbers // WEIGHTS_PER_PATCH * PATCH_BYTES)


def _scale_bytes(outputs: int, inputs: int, kept: Kept, placement: Placement) -> int:
    """Beside codes that lie as they come."""
    if kept.block is not None:
        rows, columns = kept.block
        return -(-outputs // rows) * -(-inputs // columns) * SCALE_BYTES
    groups = 1 if kept.group is None else inputs // kept.group
    if kept.kind == "int4" and kept.group in TORCH_INT4_GROUPS and placement.has_torch_int4:
        return outputs * groups * TORCH_INT4_SCALE_BYTES
    if not placement.is_cpu and (size := gpu_group(kept.group, inputs)) is not None:
        return outputs * (inputs // size) * GPU_MEANING_BYTES
    return outputs * groups * SCALE_BYTES * (2 if kept.has_zeros else 1)


def gpu_group(group: int | None, inputs: int) -> int | None:
    """Inputs that share a word where GPU products read codes in groups of that size; None where none do.

    As `kernels.triton.coded_weight` has it; a rank's share may end within a group.
    """
    size = inputs if group is None else gcd(group, inputs)
    if size == inputs:
        return inputs
    size = size if size % GPU_BLOCK_INPUTS == 0 else gcd(size, GPU_BLOCK_INPUTS)
    return size if size >= LEAST_GPU_GROUP else None


def _strip_bytes(outputs: list[int], inputs: int, kept: Kept, placement: Placement) -> int | None:
    """None where kernels have no strips for these sizes."""
    per_scale = inputs if kept.group is None else kept.group
    if kept.block is not None:
        per_scale = kept.block[1]
        if inputs % per_scale:
            return None
    per_vector = INPUTS_PER_VECTOR[kept.kind]
    sizes = range(per_vector, MOST_GROUP_INPUTS + 1, per_vector)
    group = max((size for size in sizes if per_scale % size == 0), default=None)
    if group is None or any(own % PANEL for own in outputs):
        return None
    panels = _panels_of_strip([own // PANEL for own in outputs], placement.num_threads)
    is_half = kept.has_halves and per_scale <= FEW_INPUTS_PER_SCALE
    head = panels * PANEL * ((2 if is_half else SCALE_BYTES) + (kept.kind == "int4" and kept.has_zeros))
    of_group = -(-head // VECTOR_BYTES) * VECTOR_BYTES + group // per_vector * panels * VECTOR_BYTES
    return prod((sum(outputs) // (panels * PANEL), inputs // group, of_group))


def _panels_of_strip(panels: list[int], num_threads: int) -> int:
    most = min(MOST_PANELS, sum(panels) // (2 * num_threads))
    return max(count for count in (1, 2, 4) if count == 1 or (count <= most and gcd(*panels) % count == 0))
