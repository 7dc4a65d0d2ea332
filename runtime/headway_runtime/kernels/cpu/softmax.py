"""Causal softmax of a chunk's attention scores, in place: its mask too is the kernel's."""

from functools import cache

import torch
from torch import Tensor

from headway_runtime.kernels.cpu.compiler import Kernel, elements
from headway_runtime.kernels.cpu.emitter import LOWEST, Elements, Emitter


class CausalSoftmax:
    """The kernel for one number of query heads that share a KV head."""

    __slots__ = ("_kernel", "_width")

    def __init__(self, num_groups: int, dtype: torch.dtype, width: int) -> None:
        name = "causal_softmax"
        self._width = width
        self._kernel = Kernel(name, _text(name, num_groups, elements(dtype), width))

    def __call__(self, scores: Tensor, num_seen: int) -> None:
        """scores: contiguous [kv_heads, tokens * num_groups, context], a multiple of the vector's width.

        num_seen: how many positions of the context the first token attends to; each later one sees one more,
        up to all of it. What a token does not see becomes 0.
        """
        heads, rows, context = scores.shape
        assert scores.is_contiguous()
        assert context % self._width == 0
        self._kernel.run(torch.get_num_threads(), heads * rows, scores.data_ptr(), rows, context, num_seen)


@cache
def _text(name: str, num_groups: int, stored: Elements, width: int) -> str:
    """A task is one row, of one query head and token."""
    emitter = Emitter(name, width)
    builder, integer = emitter.builder, emitter.integer
    count, scores, rows, context, num_seen = (emitter.argument(index) for index in range(1, 6))
    with emitter.tasks(emitter.argument_address(0), count) as task:
        row = emitter.offset(scores, (builder.mul(task, context), stored.num_bytes))
        token = builder.sdiv(builder.srem(task, rows), integer(num_groups))
        seen = emitter.smaller_integer(builder.add(num_seen, token), context)
        largest, total = emitter.variable(emitter.splat(LOWEST)), emitter.variable(emitter.splat(0.0))
        with emitter.loop(seen, step=width) as at:
            score = emitter.masked(emitter.load(row, at, stored), builder.sub(seen, at), LOWEST)
            largest.set(emitter.larger(score, largest.get()))
        highest = emitter.largest_lane(largest.get())
        with emitter.loop(seen, step=width) as at:
            weight = emitter.exp(emitter.subtract(emitter.load(row, at, stored), highest))
            total.set(emitter.add(total.get(), emitter.masked(weight, builder.sub(seen, at), 0.0)))
        inverse = emitter.divide(emitter.splat(1.0), emitter.sum_of_lanes(total.get()))
        with emitter.loop(context, step=width) as at:
            weight = emitter.exp(emitter.subtract(emitter.load(row, at, stored), highest))
            share = emitter.masked(emitter.multiply(weight, inverse), builder.sub(seen, at), 0.0)
            emitter.store(share, row, at, stored)
    return emitter.finish()
