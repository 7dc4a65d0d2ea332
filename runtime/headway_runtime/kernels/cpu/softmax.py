"""Causal softmax of a chunk's attention scores, in place: its mask, window and soft cap are the kernel's."""

from dataclasses import dataclass

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.elements import Elements
from headway_runtime.kernels.cpu.emitter import LOWEST, Emitter
from headway_runtime.kernels.cpu.scoring import Scoring


class CausalSoftmax:
    """The kernel for one number of query heads that share a KV head, and one way of scoring.

    The scale of scores is none of its business.
    """

    __slots__ = ("_kernel", "_width")

    def __init__(self, num_groups: int, scoring: Scoring, dtype: torch.dtype, width: int) -> None:
        name = "causal_softmax"
        self._width = width
        one = _Writer(name, num_groups, scoring.window, scoring.soft_cap, elements(dtype), width)
        self._kernel = Kernel(name, one.text())

    def __call__(self, scores: Tensor, num_seen: int) -> None:
        """scores: contiguous [kv_heads, tokens * num_groups, context], a multiple of the vector's width.

        num_seen: up to which position of the context the first token attends; each later one attends to one
        more, up to all of it, and to no more than its window. What a token does not see becomes 0.
        """
        heads, rows, context = scores.shape
        assert scores.is_contiguous()
        assert context % self._width == 0
        self._kernel.run(torch.get_num_threads(), heads * rows, scores.data_ptr(), rows, context, num_seen)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the kernel. A task is one row, of one query head and token."""

    name: str
    num_groups: int
    window: int | None
    soft_cap: float | None
    stored: Elements
    width: int

    def text(self) -> str:
        emitter = Emitter(self.name, self.width)
        builder, stored, width = emitter.builder, self.stored, self.width
        count, scores, rows, context, num_seen = (emitter.argument(index) for index in range(1, 6))
        with emitter.tasks(emitter.argument_address(0), count) as task:
            row = emitter.offset(scores, (builder.mul(task, context), stored.num_bytes))
            token = builder.sdiv(builder.srem(task, rows), emitter.integer(self.num_groups))
            end = builder.add(num_seen, token)
            seen = emitter.smaller_integer(end, context)
            start, hidden = self._start(emitter, end)
            largest, total = emitter.variable(emitter.splat(LOWEST)), emitter.variable(emitter.splat(0.0))

            def seen_alone(value: ir.Value, at: ir.Value, otherwise: float) -> ir.Value:
                value = emitter.masked(value, builder.sub(seen, at), otherwise)
                if self.window is None:
                    return value
                return emitter.masked_first(value, builder.sub(hidden, at), otherwise)

            with emitter.loop(seen, start=start, step=width) as at:
                score = seen_alone(self._score(emitter, row, at), at, LOWEST)
                largest.set(emitter.larger(score, largest.get()))
            highest = emitter.largest_lane(largest.get())
            with emitter.loop(seen, start=start, step=width) as at:
                weight = emitter.exp(emitter.subtract(self._score(emitter, row, at), highest))
                total.set(emitter.add(total.get(), seen_alone(weight, at, 0.0)))
            inverse = emitter.divide(emitter.splat(1.0), emitter.sum_of_lanes(total.get()))
            if self.window is not None:
                with emitter.loop(emitter.smaller_integer(start, context), step=width) as at:
                    emitter.store(emitter.splat(0.0), row, at, stored)
            with emitter.loop(context, start=start, step=width) as at:
                weight = emitter.exp(emitter.subtract(self._score(emitter, row, at), highest))
                share = seen_alone(emitter.multiply(weight, inverse), at, 0.0)
                emitter.store(share, row, at, stored)
        return emitter.finish()

    def _start(self, emitter: Emitter, end: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first vector that a token sees some of, and how many tokens come before its window."""
        nothing = emitter.integer(0)
        if self.window is None:
            return nothing, nothing
        hidden = emitter.larger_integer(emitter.builder.sub(end, emitter.integer(self.window)), nothing)
        return emitter.builder.and_(hidden, emitter.integer(-self.width)), hidden

    def _score(self, emitter: Emitter, row: ir.Value, at: ir.Value) -> ir.Value:
        score = emitter.load(row, at, self.stored)
        return score if self.soft_cap is None else emit_capped(emitter, score, self.soft_cap)


def emit_capped(emitter: Emitter, score: ir.Value, soft_cap: float) -> ir.Value:
    """soft_cap * tanh(score / soft_cap)."""
    over_cap = emitter.multiply(score, emitter.splat(1.0 / soft_cap))
    return emitter.multiply(emitter.tanh(over_cap), emitter.splat(soft_cap))
