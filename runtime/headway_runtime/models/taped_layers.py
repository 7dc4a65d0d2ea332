"""Decode steps through a model's layers as a tape of kernel calls (see kernels/cpu/tape.py).

A step of a few sequences that decode, one token each or some guesses more, makes the same calls each time,
as long as what it reads and writes lies where it lay before. So there are tensors for what changes, which
each step fills; and what layers allocate while they are noted comes from memory that only tapes use.

Nothing needs to be known of the layers: an operator of PyTorch's own among the kernels, which a tape would
leave out, is noticed while they are noted, and that model has no tapes.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway_runtime.layers.attention import AttentionInputs, Decodes, DecodesAgain, KVCache
from headway_runtime.layers.cpu_kernels import noted, tape

if TYPE_CHECKING:
    from headway_runtime.kernels.cpu.tape import Tape

logger = logging.getLogger(__name__)

# What Python takes is little of a step of more.
MOST_ROWS = 64
# Of attention, for all rows: decodes, then guesses.
MOST_CALLS = 2
# By rows of each kind, threads and situation. A tape is some 200 bytes for each call.
MOST_STEPS = 512
# Memory that layers write to: a layer's lies beside that of the layer before, which it reads, and takes the
# place of the one before that.
NUM_TURNS = 2
LEAST_CHUNK_BYTES = 1 << 20
ALIGNMENT = 64

_DECODING = (Decodes, DecodesAgain)

Rotations = list[tuple[Tensor, Tensor]]
# Of the step at hand: what its calls depend on beside its tokens, and who owns what that is about.
Situation = Callable[[], tuple[Hashable, object]]

_ALLOCATE = frozenset(
    (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)
)
_LOOK = frozenset(
    (
        *(torch.ops.aten.view, torch.ops.aten._unsafe_view, torch.ops.aten.slice, torch.ops.aten.select),
        *(torch.ops.aten.split, torch.ops.aten.unsqueeze, torch.ops.aten.squeeze, torch.ops.aten.transpose),
        *(torch.ops.aten.t, torch.ops.aten.expand, torch.ops.aten.alias, torch.ops.aten.as_strided),
        *(torch.ops.aten.permute, torch.ops.aten.detach),
    )
)


class Layer(Protocol):
    """One decoder layer; see `LlamaLayer`."""

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotations: Rotations,
        cache: KVCache,
        inputs: AttentionInputs,
    ) -> Tensor: ...


class TapedLayers:
    """num_positions: how long a sequence may become."""

    def __init__(self, layers: Sequence[Layer], num_positions: int, situation: Situation) -> None:
        self._layers, self._num_positions, self._situation = layers, num_positions, situation
        # The latest used last. Of those that occurred once, nothing is noted yet.
        self._steps: dict[Hashable, _Step | None] = {}
        self._memory = _Memory()
        self._inputs: _Inputs | None = None
        # That all of these are about.
        self._cache: KVCache | None = None
        self._is_possible = True

    def __call__(
        self, hidden: Tensor, rotations: Rotations, cache: KVCache, inputs: AttentionInputs
    ) -> Tensor | None:
        """What the layers make of `hidden`; None for steps that are no tape, or not yet: nothing is done."""
        if (
            not self._is_possible
            or not all(isinstance(call, _DECODING) for call in inputs.calls)
            or len(inputs.calls) > MOST_CALLS
            or cache.kernels is None
            or inputs.num_padding
            or not 0 < len(hidden) <= MOST_ROWS
        ):
            return None
        if cache is not self._cache:
            self._cache, self._inputs = cache, None
            self._steps.clear()
        circumstances, owner = self._situation()
        ends = tuple(call.end for call in inputs.calls)
        key = (ends, inputs.num_decodes, torch.get_num_threads(), circumstances)
        if key not in self._steps:
            # Noting takes as long as some steps; what occurs once is not worth it.
            if len(self._steps) == MOST_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = None
            return None
        if self._inputs is None:
            num_blocks = -(-self._num_positions // cache.shape.block_size)
            self._inputs = _Inputs.made(hidden, rotations, num_blocks)
        self._inputs.fill(hidden, rotations, inputs)
        own_hidden = self._inputs.hidden[: len(hidden)]
        # The latest used lies last.
        step = self._steps[key] = self._steps.pop(key)
        if step is not None:
            step.tape.run()
            return own_hidden + step.delta
        delta, step = self._noted(own_hidden, self._inputs.attention(inputs), cache, owner)
        self._steps[key] = step
        self._is_possible = step is not None
        return own_hidden + delta

    def _noted(
        self, hidden: Tensor, attention: AttentionInputs, cache: KVCache, owner: object
    ) -> tuple[Tensor, "_Step | None"]:
        """The last layer's delta, and the tape, if all that was computed is on it."""
        assert self._inputs is not None
        rotations = self._inputs.rotations_of(len(hidden))

        def compute() -> Tensor:
            delta: Tensor | None = None
            for layer in self._layers:
                self._memory.turn()
                delta = layer(hidden, delta, rotations, cache, attention)
            assert delta is not None
            return delta

        with _Watch(self._memory) as watch:
            delta, calls = noted(compute)
        if watch.foreign is not None:
            logger.info("decode steps run kernel by kernel: among kernels there is %s", watch.foreign)
            return delta, None
        owners = (self._inputs, self._memory.chunks, cache, self._layers, owner)
        return delta, _Step(tape(calls, owners), delta)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What changes from step to step, for up to MOST_ROWS rows. tables: [rows, blocks]."""

    hidden: Tensor
    rotations: Rotations
    positions: Tensor
    slots: Tensor
    tables: Tensor

    @classmethod
    def made(cls, hidden: Tensor, rotations: Rotations, num_blocks: int) -> "_Inputs":
        def room(like: Tensor) -> Tensor:
            return like.new_empty((MOST_ROWS, like.shape[1]))

        return cls(
            room(hidden),
            [(room(cosine), room(sine)) for cosine, sine in rotations],
            torch.empty(MOST_ROWS, dtype=torch.int64),
            torch.empty(MOST_ROWS, dtype=torch.int64),
            torch.zeros((MOST_ROWS, num_blocks), dtype=torch.int64),
        )

    def rotations_of(self, num_rows: int) -> Rotations:
        return [(cosine[:num_rows], sine[:num_rows]) for cosine, sine in self.rotations]

    def attention(self, given: AttentionInputs) -> AttentionInputs:
        """The same calls, about these tensors."""
        calls: list[Decodes | DecodesAgain] = []
        for call in given.calls:
            assert isinstance(call, _DECODING)
            rows = slice(call.start, call.end)
            own = (call.start, call.end, self.tables[rows], self.positions[rows])
            # Kernels mask by positions.
            calls.append(Decodes(*own, call.masks) if isinstance(call, Decodes) else DecodesAgain(*own))
        return AttentionInputs(self.slots[: len(given.slots)], None, calls, given.num_decodes)

    def fill(self, hidden: Tensor, rotations: Rotations, given: AttentionInputs) -> None:
        num_rows = len(hidden)
        self.hidden[:num_rows].copy_(hidden)
        for own, new in zip(self.rotations, rotations, strict=True):
            for to, of in zip(own, new, strict=True):
                to[:num_rows].copy_(of)
        self.slots[:num_rows].copy_(given.slots)
        for call in given.calls:
            assert isinstance(call, _DECODING)
            rows = slice(call.start, call.end)
            self.positions[rows].copy_(call.positions)
            self.tables[rows, : call.tables.shape[1]].copy_(call.tables)


@dataclass(frozen=True, slots=True)
class _Step:
    """delta: what the last layer leaves."""

    tape: "Tape"
    delta: Tensor


class _Memory:
    """Memory for what layers write, in turns; what one turn got, the next but one gets again."""

    def __init__(self) -> None:
        self.chunks: list[list[Tensor]] = [[] for _ in range(NUM_TURNS)]
        self._turn, self._chunk, self._used = 0, 0, 0

    def turn(self) -> None:
        self._turn, self._chunk, self._used = (self._turn + 1) % NUM_TURNS, 0, 0

    def like(self, tensor: Tensor) -> Tensor:
        """As large, and of the same shape and type."""
        own, size = self.chunks[self._turn], max(1, tensor.nbytes)
        while self._chunk < len(own) and self._used + size > len(own[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(own):
            own.append(torch.empty(max(size, LEAST_CHUNK_BYTES), dtype=torch.uint8))
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return own[self._chunk][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped
    """Hands out `memory` for what is allocated. foreign: an operator that computes, if there was one."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.foreign: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would import its compiler for it: 900 modules, a second in the midst of an answer.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATE:
            assert result.is_contiguous()
            return self._memory.like(result)
        if func.overloadpacket not in _LOOK:
            self.foreign = str(func)
        return result
