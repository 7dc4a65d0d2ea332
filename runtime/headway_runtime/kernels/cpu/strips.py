"""How weights of 8- and 4-bit codes lie in memory: in the order in which a kernel reads them.

A strip is a few panels of 16 outputs, one piece of memory from its first input to its last. For each group of
inputs it holds the panels' scales, their zero points, and then their codes: 64 bytes of the first panel, of
the second, and so on, then of the next inputs. What the 64 bytes are is told in `codes.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from headway_runtime import cleared_memory
from headway_runtime.kernels.cpu.codes import VECTOR_BYTES
from headway_runtime.kernels.cpu.elements import Elements

PANEL = 16
MOST_PANELS = 4
LONG_BYTES = 4
SCALE_TYPES = {"float32": torch.float32, "float16": torch.float16}
# What a group's numbers, widened, may take of a core's cache.
MOST_GROUP_INPUTS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a weight's outputs. scales: float32 [outputs, groups]; zeros: uint8, as scales, or None.

    codes: int32; of every 16 rows, each column becomes 64 bytes.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """What all groups of a kernel's strips have in common.

    inputs_per_vector: of each output of a panel in 64 bytes. scales: how they lie in memory.
    """

    inputs_per_vector: int
    num_panels: int
    scales: Elements
    has_zeros: bool = False

    @property
    def num_outputs(self) -> int:
        """Of a strip."""
        return self.num_panels * PANEL

    @property
    def zeros_offset(self) -> int:
        """Bytes from a group's beginning, where its scales are, to its zero points."""
        return self.num_outputs * self.scales.num_bytes

    @property
    def codes_offset(self) -> int:
        end = self.zeros_offset + (self.num_outputs if self.has_zeros else 0)
        return -(-end // VECTOR_BYTES) * VECTOR_BYTES

    @property
    def step_bytes(self) -> int:
        """64 bytes of each panel."""
        return self.num_panels * VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class Strips:
    """A weight's strips. num_groups: of inputs; num_steps: how often a group has 64 bytes of each panel."""

    layout: Layout
    num_groups: int
    num_steps: int

    @property
    def num_inputs(self) -> int:
        return self.num_groups * self.num_steps * self.layout.inputs_per_vector

    @property
    def group_bytes(self) -> int:
        return self.layout.codes_offset + self.num_steps * self.layout.step_bytes

    def pack(self, parts: Iterable[Part], num_outputs: int) -> Tensor:
        """uint8 [strips, bytes]. Each part's outputs are a multiple of a strip's."""
        num_strips = num_outputs // self.layout.num_outputs
        memory = new_memory(num_strips * self.num_groups * self.group_bytes)
        assert memory.data_ptr() % VECTOR_BYTES == 0, "PyTorch aligns what it allocates, and so do we"
        weight = memory.view(num_strips, self.num_groups, self.group_bytes)
        start = 0
        for part in parts:
            end = start + len(part.codes) // self.layout.num_outputs
            self._pack_part(weight[start:end], part)
            start = end
        assert start == num_strips
        return weight.flatten(1)

    def _pack_part(self, weight: Tensor, part: Part) -> None:
        layout = self.layout
        codes = weight.view(torch.int32)[:, :, layout.codes_offset // LONG_BYTES :]
        places = codes.view(*codes.shape[:2], self.num_steps, layout.num_panels, PANEL)
        by_output = part.codes.view(-1, layout.num_panels, PANEL, self.num_groups, self.num_steps)
        places.copy_(by_output.permute(0, 3, 4, 1, 2))
        scales = weight.view(SCALE_TYPES[layout.scales.name])[:, :, : layout.num_outputs]
        scales.copy_(self._by_group(part.scales))
        if part.zeros is not None:
            zeros = weight[:, :, layout.zeros_offset : layout.zeros_offset + layout.num_outputs]
            zeros.copy_(self._by_group(part.zeros))

    def _by_group(self, numbers: Tensor) -> Tensor:
        return numbers.view(-1, self.layout.num_outputs, self.num_groups).transpose(1, 2)


def new_memory(num_bytes: int) -> Tensor:
    """uint8, from a multiple of a vector's size on; what was cleared for weights, where some is left."""
    prepared = cleared_memory.take(num_bytes)
    if prepared is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(prepared, dtype=torch.uint8)


def group_inputs_of(inputs_per_scale: int, inputs_per_vector: int) -> int | None:
    """The largest groups that scales, caches and vectors allow; None where there are none."""
    sizes = range(inputs_per_vector, MOST_GROUP_INPUTS + 1, inputs_per_vector)
    return max((size for size in sizes if inputs_per_scale % size == 0), default=None)


def num_panels_of(outputs: Sequence[int]) -> int:
    """The widest strips that divide every part and leave each thread some. outputs: of each, of panels."""
    panels = [own // PANEL for own in outputs]
    most = min(MOST_PANELS, sum(panels) // (2 * torch.get_num_threads()))
    return max(count for count in (1, 2, 4) if count == 1 or (count <= most and gcd(*panels) % count == 0))
