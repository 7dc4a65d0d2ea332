"""Linear layers in bfloat16 for processors that multiply pairs of them (AVX-512 BF16).

The weight lies in panels of 16 outputs: for each two inputs, 16 outputs' pairs of weights, one vector. A tile
of a few rows times a few panels is summed in registers while the panels stream by once; a pair of a row's
numbers is met in all lanes at once. Few rows wait for memory alone, and a row more costs little.
"""

import math
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime import cleared_memory
from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.elements import BFLOAT16
from headway_runtime.kernels.cpu.emitter import Emitter

PANEL = 16
PAIRS_BYTES = 64
# A tile: as many sums as registers hold beside a pair of each row and panel.
TILE_ROWS = 6
MOST_PANELS = 4
# How far ahead of what is multiplied weights are asked for, in each panel.
PREFETCH_BYTES = 1024
# Numbers of so many rows are multiplied by one panel group after the other: they stay in a core's cache.
ROWS_AT_ONCE_NUMBERS = 200_000


class PairsLinear:
    """y = x @ weight.T (+ bias); the weight's rows come in parts, one below the other."""

    __slots__ = ("_bias", "_kernel", "_num_panels", "num_inputs", "num_outputs", "weight")

    def __init__(self, parts: list[Tensor], bias: Tensor | None) -> None:
        """parts: bfloat16 [outputs, inputs] each, outputs a multiple of PANEL, inputs even."""
        self.num_inputs = parts[0].shape[1]
        self.num_outputs = sum(len(part) for part in parts)
        num_panels = self.num_outputs // PANEL
        # Pairs as one number each.
        self.weight = _new_weight((num_panels, self.num_inputs // 2, PANEL))
        assert self.weight.data_ptr() % PAIRS_BYTES == 0, "PyTorch aligns what it allocates, and so do we"
        start = 0
        for part in parts:
            pairs = part.contiguous().view(torch.int32).view(-1, PANEL, self.num_inputs // 2)
            self.weight[start : start + len(pairs)] = pairs.transpose(1, 2)
            start += len(pairs)
        self._bias = bias
        # The widest tiles that leave each thread some.
        enough = 2 * torch.get_num_threads()
        self._num_panels = next(
            count
            for count in (MOST_PANELS, 2, 1)
            if count == 1 or (num_panels % count == 0 and num_panels // count >= enough)
        )
        name = "pairs_linear"
        self._kernel = Kernel(name, _text(name, self._num_panels, has_bias=bias is not None))

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous bfloat16 [rows, inputs]. Returns [rows, outputs]."""
        num_rows = len(x)
        assert x.is_contiguous()
        assert x.shape[1] == self.num_inputs
        assert x.dtype == torch.bfloat16
        out = x.new_empty((num_rows, self.num_outputs))
        at_once = max(TILE_ROWS, ROWS_AT_ONCE_NUMBERS // self.num_inputs // TILE_ROWS * TILE_ROWS)
        self._kernel.run(
            torch.get_num_threads(),
            x.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            self.num_inputs,
            self.num_outputs,
            num_rows,
            min(at_once, max(1, num_rows)),
            self.num_outputs // (PANEL * self._num_panels),
            0 if self._bias is None else self._bias.data_ptr(),
        )
        return out


def _new_weight(shape: tuple[int, int, int]) -> Tensor:
    prepared = cleared_memory.take(math.prod(shape) * torch.int32.itemsize)
    if prepared is None:
        return torch.empty(shape, dtype=torch.int32)
    return torch.frombuffer(prepared, dtype=torch.int32).view(shape)


@cache
def _text(name: str, num_panels: int, *, has_bias: bool) -> str:
    """A task is a group of panels and the rows that are met at once."""
    emitter = Emitter(name, PANEL)
    builder, integer = emitter.builder, emitter.integer
    x, weight, out, inputs, outputs, rows, at_once, groups, bias = (
        emitter.argument(index) for index in range(1, 10)
    )
    pairs = builder.sdiv(inputs, integer(2))
    panel_bytes = builder.mul(pairs, integer(PAIRS_BYTES))
    row_bytes, out_row_bytes = (builder.mul(size, integer(2)) for size in (inputs, outputs))

    def tile(first: ir.Value, count: int, group: ir.Value) -> None:
        """`count` rows from `first` on times a group of panels."""
        panels = [
            builder.add(
                weight,
                builder.mul(builder.add(builder.mul(group, integer(num_panels)), integer(one)), panel_bytes),
            )
            for one in range(num_panels)
        ]
        own_rows = [
            builder.add(x, builder.mul(builder.add(first, integer(row)), row_bytes)) for row in range(count)
        ]
        columns = builder.mul(group, integer(num_panels * PANEL * 2))
        begin = [
            emitter.load(builder.add(bias, columns), one * PANEL, BFLOAT16)
            if has_bias
            else emitter.splat(0.0)
            for one in range(num_panels)
        ]
        sums = [[emitter.variable(one) for one in begin] for _ in range(count)]
        with emitter.loop(pairs) as pair:
            vectors = []
            for panel in panels:
                place = emitter.offset(panel, (pair, PAIRS_BYTES))
                vectors.append(emitter.load_pairs(place))
                emitter.prefetch(emitter.offset(place, (integer(PREFETCH_BYTES), 1)), PAIRS_BYTES)
            for row, row_sums in zip(own_rows, sums, strict=True):
                number = emitter.load_pair(emitter.offset(row, (pair, 4)))
                for vector, total in zip(vectors, row_sums, strict=True):
                    total.set(emitter.add_products_of_pairs(total.get(), vector, number))
        for row, row_sums in enumerate(sums):
            place = builder.add(out, builder.mul(builder.add(first, integer(row)), out_row_bytes))
            for one, total in enumerate(row_sums):
                emitter.store(total.get(), builder.add(place, columns), one * PANEL, BFLOAT16)

    blocks = builder.sdiv(builder.add(rows, builder.sub(at_once, integer(1))), at_once)
    with emitter.tasks(emitter.argument_address(0), builder.mul(blocks, groups)) as task:
        group = builder.srem(task, groups)
        first = builder.mul(builder.sdiv(task, groups), at_once)
        end = emitter.smaller_integer(builder.add(first, at_once), rows)
        left = builder.srem(builder.sub(end, first), integer(TILE_ROWS))
        last = builder.sub(end, left)
        with emitter.loop(last, start=first, step=TILE_ROWS) as row:
            tile(row, TILE_ROWS, group)
        for count in range(1, TILE_ROWS):
            with builder.if_then(builder.icmp_signed("==", left, integer(count))):
                tile(last, count, group)
    return emitter.finish()
