"""Linear layers to which adapters add something: y = base(x) + x @ A.T @ B.T, each row by its own A and B.

Several of a model's layers may be merged into one product (queries, keys and values; gate and up). Of an
adapter their A's are then one matrix, and each B adds to its own part of the outputs. The base's weight may
be quantized or packed in any way: what adapters add is computed beside it, from weights of their own.

Without an adapter in the step, a layer costs one comparison more than its base. What a step's rows are is put
into the bank that all layers share; each layer meets all of them in order, perhaps in pieces.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from headway_runtime.adapters.adapter_file import LayerDelta, LayerShape
from headway_runtime.adapters.adapter_rows import AdapterRows, Group, Piece
from headway_runtime.layers.cpu_kernels import adapter_products

if TYPE_CHECKING:
    from headway_runtime.kernels.cpu.adapter_products import AdapterProducts, PackedDelta
    from headway_runtime.layers.linear import AnyLinear


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of a model's layers inside a merged product, as far as this process has it.

    outputs, inputs: which of the layer's own are here; all of them, unless several processes share it.
    """

    name: str
    shape: LayerShape
    outputs: slice
    inputs: slice

    @property
    def num_outputs(self) -> int:
        """Here."""
        return len(range(*self.outputs.indices(self.shape.num_outputs)))


@dataclass(frozen=True, slots=True)
class PlainDelta:
    """What one adapter adds to a product. a: [ranks of all parts, inputs].

    parts: where the outputs of a part begin and end, where its rank does in `a`, and its B.
    """

    a: Tensor
    parts: tuple[tuple[slice, slice, Tensor], ...]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + sum(b.nbytes for _, _, b in self.parts)

    def add_to(self, out: Tensor, x: Tensor, group: Group) -> None:
        """Add to `out` what a group's rows of `x` make."""
        chosen: slice | Tensor = slice(group.start, group.end) if group.rows is None else group.rows
        middle = x[chosen].to(self.a.dtype) @ self.a.T
        for outputs, ranks, b in self.parts:
            added = (middle[:, ranks] @ b.T).to(out.dtype)
            if group.rows is None:
                out[chosen, outputs] += added
            else:
                out[:, outputs].index_add_(0, group.rows, added)


class AdaptedLinear:
    """base: the product without adapters. parts: the layers that it is made of, one below the other."""

    __slots__ = ("_bank", "_deltas", "_kernel", "_next_row", "_rows", "base", "parts")

    def __init__(
        self, base: "AnyLinear", parts: tuple[LinearPart, ...], bank: "AdapterBank", dtype: torch.dtype
    ) -> None:
        self.base = base
        self.parts = parts
        self._bank = bank
        self._deltas: dict[int, PlainDelta] = {}
        sizes = [part.num_outputs for part in parts]
        self._kernel: AdapterProducts | None = adapter_products(
            base.num_inputs, sizes, bank.num_slots, dtype, bank.device
        )
        # Of the step whose rows this layer is being given, and how many of them it has met.
        self._rows: AdapterRows | None = None
        self._next_row = 0

    @property
    def num_inputs(self) -> int:
        return self.base.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.base.num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        rows = self._bank.rows
        if rows is None:
            return out
        if rows is not self._rows:
            self._rows, self._next_row = rows, 0
        start = self._next_row
        self._next_row += len(x)
        piece = rows.piece(start, self._next_row)
        if piece is not None:
            self._add(out, x, piece)
        return out

    def _add(self, out: Tensor, x: Tensor, piece: Piece) -> None:
        if self._kernel is not None:
            self._kernel(out, x, piece.tiles)
            return
        for group in piece.groups:
            delta = self._deltas.get(group.slot)
            if delta is not None:
                delta.add_to(out, x, group)

    def num_bytes(self, rank: int) -> int:
        """What an adapter of that rank takes that changes all parts."""
        if self._kernel is not None:
            return self._kernel.num_bytes(rank)
        numbers = len(self.parts) * self.num_inputs + self.num_outputs
        return rank * numbers * self._bank.delta_dtype.itemsize

    def made(self, deltas: Mapping[str, LayerDelta]) -> "PlainDelta | PackedDelta | None":
        """What of an adapter this product takes, in the form that it is used in; None if nothing."""
        own = [deltas.get(part.name) for part in self.parts]
        if not any(own):
            return None
        matrices = [
            None if delta is None else (delta.a[:, part.inputs], delta.b[part.outputs])
            for part, delta in zip(self.parts, own, strict=True)
        ]
        if self._kernel is not None:
            return self._kernel.packed(matrices)
        return _plain(matrices, [part.num_outputs for part in self.parts], self._bank)

    def put(self, slot: int, delta: "PlainDelta | PackedDelta | None") -> None:
        """From the next step on, rows of that slot get it."""
        if self._kernel is not None:
            assert not isinstance(delta, PlainDelta)
            self._kernel.put(slot, delta)
            return
        self._deltas.pop(slot, None)
        if delta is not None:
            assert isinstance(delta, PlainDelta)
            self._deltas[slot] = delta


AnyDelta = Union[PlainDelta, "PackedDelta"]


class AdapterBank:
    """All products of a model that adapters can change, and the rows of the step that they work on.

    num_slots: the highest number of an adapter. dtype: of the model's arithmetic.
    """

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self.dtype = dtype
        # PyTorch's bfloat16 products make a kernel for every number of rows where they are oneDNN's.
        self.delta_dtype = torch.float32 if device.type == "cpu" else dtype
        self.rows: AdapterRows | None = None
        self._linears: list[AdaptedLinear] = []
        # Of what is in the slots.
        self._version = 0

    def situation(self) -> tuple[Hashable, object]:
        """Of the step: two that are alike in the first use the same weights for the same rows."""
        if self.rows is None:
            return None, None
        # Made now, by PyTorch's operators: met among a layer's kernels, these would keep it from a tape.
        self.rows.piece(0, self.rows.num_rows)
        return (self._version, self.rows.slots), self.rows

    def adapted(self, base: "AnyLinear", parts: tuple[LinearPart, ...]) -> AdaptedLinear:
        linear = AdaptedLinear(base, parts, self, self.dtype)
        self._linears.append(linear)
        return linear

    @property
    def layers(self) -> dict[str, LayerShape]:
        """The layers that an adapter may change, by name."""
        return {part.name: part.shape for linear in self._linears for part in linear.parts}

    def num_bytes(self, rank: int) -> int:
        """What an adapter of that rank takes that changes all layers."""
        return sum(linear.num_bytes(rank) for linear in self._linears)

    def made(self, deltas: Mapping[str, LayerDelta]) -> list[AnyDelta | None]:
        """An adapter in the forms in which it is used; may be called by any thread."""
        return [linear.made(deltas) for linear in self._linears]

    def put(self, slot: int, deltas: list[AnyDelta | None]) -> None:
        """Use these for the slot from the next step on."""
        self._version += 1
        for linear, delta in zip(self._linears, deltas, strict=True):
            linear.put(slot, delta)

    def drop(self, slot: int) -> None:
        """Forget what a slot has; its memory is free."""
        self._version += 1
        for linear in self._linears:
            linear.put(slot, None)


def _plain(matrices: list[tuple[Tensor, Tensor] | None], sizes: list[int], bank: AdapterBank) -> PlainDelta:
    found, first, rank = [], 0, 0
    for pair, size in zip(matrices, sizes, strict=True):
        if pair is not None:
            a, b = pair
            own = b.to(bank.device, bank.delta_dtype).contiguous()
            found.append((slice(first, first + size), slice(rank, rank + len(a)), own))
            rank += len(a)
        first += size
    merged = torch.cat([pair[0] for pair in matrices if pair is not None])
    return PlainDelta(merged.to(bank.device, bank.delta_dtype), tuple(found))


def base_of(linear: "AnyLinear") -> "AnyLinear":
    """A layer as it is without adapters."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear
