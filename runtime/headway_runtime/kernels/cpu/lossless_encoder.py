"""Encodes bfloat16 weights in 12 bits each, as `lossless_codes.py` says, at the speed of memory.

Which magnitudes a strip's table holds is found by counting some of its weights. That decides how many patches
there are, never what is decoded.
"""

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.codes import BYTES, VECTOR_BYTES
from headway_runtime.kernels.cpu.compiler import Kernel
from headway_runtime.kernels.cpu.elements import I16, I32, I64
from headway_runtime.kernels.cpu.emitter import Emitter, Variable
from headway_runtime.kernels.cpu.lossless_codes import (
    CODE_SIGN,
    GROUP_STEPS,
    NIBBLE_BITS,
    NUM_KNOWN,
    NUMBER_BYTES,
    SIGN_BIT,
    STEP_BYTES,
    STEP_INPUTS,
    STEP_PAIRS,
    TABLE_BYTES,
    LosslessStrips,
    load_bytes,
    shifted,
    store_bytes,
)
from headway_runtime.kernels.cpu.strips import PANEL, new_memory

NUM_MAGNITUDES = 128
# What the table that is read backwards says of magnitudes that have no code: it is below zero.
UNKNOWN = 0x80
# With more patches, a weight would no longer be much smaller, nor its products as fast; a single strip may
# have more of them.
LEAST_WEIGHTS_PER_PATCH, LEAST_STRIP_WEIGHTS_PER_PATCH = 256, 32
# Weights of a strip that are counted.
SAMPLE_NUMBERS = 4096
# On its way a patch has its strip's step above, and takes so many bytes.
STEP_SHIFT, PATCH_BYTES, COUNT_BYTES = 32, 8, 8
PAIR_NUMBERS = 2 * PANEL


def encoded(parts: Sequence[Tensor], num_panels: int) -> LosslessStrips | None:
    """None where weights have too many magnitudes.

    parts: bfloat16 [outputs, inputs], one below the other; outputs are a multiple of a strip's, inputs of a
        step's.
    """
    strip_numbers = num_panels * PANEL * parts[0].shape[1]
    counts = [_counted(part.contiguous().view(-1, strip_numbers)) for part in parts]
    num_counted = sum(int(count.sum()) for count in counts)
    found = [count.topk(NUM_KNOWN, dim=1) for count in counts]
    num_known = sum(int(count.values.sum()) for count in found)
    if (num_counted - num_known) * LEAST_WEIGHTS_PER_PATCH > num_counted:
        return None
    return _encoded(parts, [count.indices.to(torch.uint8) for count in found], num_panels)


def _counted(numbers: Tensor) -> Tensor:
    """How often each magnitude is among some of a strip's numbers, [strips, NUM_MAGNITUDES]."""
    every = max(1, numbers.shape[1] // SAMPLE_NUMBERS) | 1
    upper = numbers.view(torch.int16)[:, ::every].to(torch.int32) >> 8 & (NUM_MAGNITUDES - 1)
    offsets = torch.arange(0, len(numbers) * NUM_MAGNITUDES, NUM_MAGNITUDES, dtype=torch.int32)
    counts = torch.bincount(
        upper.add_(offsets.unsqueeze(1)).view(-1), minlength=len(numbers) * NUM_MAGNITUDES
    )
    return counts.view(-1, NUM_MAGNITUDES)


def _encoded(parts: Sequence[Tensor], known: list[Tensor], num_panels: int) -> LosslessStrips | None:
    """known: uint8 [strips, NUM_KNOWN], each part's magnitudes that have codes."""
    num_inputs, num_strips = parts[0].shape[1], sum(map(len, known))
    strip_numbers = num_panels * PANEL * num_inputs
    codes = new_memory(num_strips * num_panels * (num_inputs // STEP_INPUTS) * STEP_BYTES)
    codes = codes.view(num_strips, -1)
    room = strip_numbers // LEAST_STRIP_WEIGHTS_PER_PATCH + 1
    patches = torch.empty((num_strips, room), dtype=torch.int64)
    counts = torch.empty(num_strips, dtype=torch.int64)
    name = "lossless_encoder"
    kernel = Kernel(name, _text(name))
    first = 0
    for part, own_known in zip(parts, known, strict=True):
        own = slice(first, first + len(own_known))
        numbers, backwards = part.contiguous(), _backwards(own_known)
        kernel.run(
            torch.get_num_threads(),
            numbers.data_ptr(),
            codes[own].data_ptr(),
            backwards.data_ptr(),
            patches[own].data_ptr(),
            counts[own].data_ptr(),
            len(own_known),
            num_panels,
            num_inputs,
            room,
        )
        first = own.stop
    most = max(1, num_strips * strip_numbers // LEAST_WEIGHTS_PER_PATCH)
    if int(counts.max()) > room or int(counts.sum()) > most:
        return None
    upper = torch.cat(known)
    tables = torch.cat((upper, upper | SIGN_BIT), 1).repeat(1, TABLE_BYTES // (2 * NUM_KNOWN))
    return LosslessStrips(num_panels, num_inputs, codes, tables, *_places(patches, counts, num_inputs))


def _backwards(known: Tensor) -> Tensor:
    """uint8 [strips, NUM_MAGNITUDES]: each magnitude's code, or UNKNOWN."""
    codes = torch.full((len(known), NUM_MAGNITUDES), UNKNOWN, dtype=torch.uint8)
    return codes.scatter_(1, known.long(), torch.arange(NUM_KNOWN, dtype=torch.uint8).expand(len(known), -1))


def _places(patches: Tensor, counts: Tensor, num_inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Patches, steps and both starts of `LosslessStrips`.

    patches: int64 [strips, room], of which each strip has `counts`, in any order.
    """
    num_steps = num_inputs // STEP_INPUTS
    num_groups = -(-num_steps // GROUP_STEPS)
    strip = torch.arange(len(counts)).repeat_interleave(counts)
    inside = torch.arange(len(strip)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    own = (patches[strip, inside] + (strip * num_steps << STEP_SHIFT)).sort().values
    steps, per_step = torch.unique_consecutive(own >> STEP_SHIFT, return_counts=True)
    group = steps // num_steps * num_groups + steps % num_steps // GROUP_STEPS
    per_group = torch.bincount(group, minlength=len(counts) * num_groups)
    # A kernel looks at the one that comes next before it knows whether one does.
    named = torch.cat((steps % num_steps, steps.new_zeros(1)))
    return own.to(torch.int32), named.to(torch.int32), _starts(per_step), _starts(per_group)


def _starts(counts: Tensor) -> Tensor:
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    return starts


@cache
def _text(name: str) -> str:
    return _Writer(Emitter(name, PANEL)).written()


class _Writer:
    """Writes the kernel. A task is a strip."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter, self._builder = emitter, emitter.builder
        arguments = [emitter.argument(index) for index in range(1, 10)]
        self._numbers, self._codes, self._backwards, self._patches, self._counts, *sizes = arguments
        self._num_strips, self._num_panels, inputs, self._room = sizes
        self._row_bytes = self._times(inputs, NUMBER_BYTES)
        self._num_steps = self._builder.sdiv(inputs, emitter.integer(STEP_INPUTS))
        self._step_bytes = self._times(self._num_panels, STEP_BYTES)
        # One panel's of a step.
        self._pairs = emitter.local(STEP_PAIRS * PANEL)

    def written(self) -> str:
        emitter, builder = self._emitter, self._builder
        num_groups = builder.sdiv(
            builder.add(self._num_steps, emitter.integer(GROUP_STEPS - 1)), emitter.integer(GROUP_STEPS)
        )
        with emitter.tasks(emitter.argument_address(0), self._num_strips) as strip:
            num_patches = emitter.variable(emitter.integer(0))
            # A panel's rows of one group stay in the nearest cache.
            with emitter.loop(num_groups) as group, emitter.loop(self._num_panels) as panel:
                first = self._times(group, GROUP_STEPS)
                last = builder.add(first, emitter.integer(GROUP_STEPS))
                with emitter.loop(emitter.smaller_integer(last, self._num_steps), start=first) as step:
                    self._step(strip, panel, step, num_patches)
            count = emitter.offset(self._counts, (strip, COUNT_BYTES))
            builder.store(num_patches.get(), builder.inttoptr(count, I64.as_pointer()))
        return emitter.finish()

    def _step(self, strip: ir.Value, panel: ir.Value, step: ir.Value, num_patches: Variable) -> None:
        emitter, builder = self._emitter, self._builder
        panels = builder.add(builder.mul(strip, self._num_panels), panel)
        rows = builder.add(self._numbers, builder.mul(self._times(panels, PANEL), self._row_bytes))
        pairs = self._pairs_of(emitter.offset(rows, (step, STEP_INPUTS * NUMBER_BYTES)))
        for index, pair in enumerate(pairs):
            store_bytes(emitter, pair, self._pair_place(emitter.integer(index)))
        steps = builder.add(builder.mul(strip, self._num_steps), step)
        place = builder.add(self._codes, builder.mul(steps, self._step_bytes))
        place = emitter.offset(place, (panel, STEP_BYTES))
        table = emitter.offset(self._backwards, (strip, NUM_MAGNITUDES))
        tables = [
            load_bytes(emitter, emitter.offset(table, (emitter.integer(index), VECTOR_BYTES)))
            for index in (0, 1)
        ]
        nibbles = []
        for half in (0, 1):
            lower, upper = (self._bytes_of(pairs[2 * half : 2 * half + 2], start) for start in (0, 1))
            own = emitter.offset(place, (emitter.integer(half + 1), VECTOR_BYTES))
            store_bytes(emitter, lower, own)
            # The sign, which is no part of the index, is not looked at.
            found = emitter.call("llvm.x86.avx512.vpermi2var.qi.512", BYTES, tables[0], upper, tables[1])
            sign = builder.and_(shifted(emitter, upper, -NIBBLE_BITS), _all(CODE_SIGN))
            nibbles.append(builder.or_(builder.and_(found, _all(NUM_KNOWN - 1)), sign))
            is_unknown = builder.bitcast(builder.icmp_signed("<", found, _all(0)), I64)
            self._note(is_unknown, half, strip, panel, step, num_patches)
        store_bytes(emitter, builder.or_(nibbles[0], shifted(emitter, nibbles[1], NIBBLE_BITS)), place)

    def _pairs_of(self, rows: ir.Value) -> list[ir.Value]:
        """A step of 16 rows as vectors of pairs: each two inputs of all rows."""
        builder = self._builder
        kind = ir.VectorType(I32, STEP_PAIRS)
        vectors = []
        for index in range(PANEL):
            row = builder.add(rows, self._times(self._row_bytes, index))
            loaded = builder.load(builder.inttoptr(row, kind.as_pointer()))
            loaded.align = NUMBER_BYTES
            vectors.append(loaded)
        while len(vectors) > 1:
            numbers = list(range(2 * vectors[0].type.count))
            order = ir.Constant(ir.VectorType(I32, len(numbers)), numbers)
            vectors = [
                builder.shuffle_vector(a, b, order) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        pairs = []
        for pair in range(STEP_PAIRS):
            lanes = [STEP_PAIRS * row + pair for row in range(PANEL)]
            own = builder.shuffle_vector(
                vectors[0], vectors[0], ir.Constant(ir.VectorType(I32, PANEL), lanes)
            )
            pairs.append(builder.bitcast(own, BYTES))
        return pairs

    def _bytes_of(self, pairs: list[ir.Value], start: int) -> ir.Value:
        """The lower or upper bytes of two vectors; `widened` interleaves them again."""
        order = [
            source + lane + 2 * index + start
            for lane in range(0, 64, 16)
            for source in (0, 64)
            for index in range(8)
        ]
        first, second = pairs
        return self._builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 64), order))

    def _note(
        self,
        unknown: ir.Value,
        half: int,
        strip: ir.Value,
        panel: ir.Value,
        step: ir.Value,
        num_patches: Variable,
    ) -> None:
        """Write down a patch for each bit that is set, of those that there is room for; all are counted."""
        emitter, builder = self._emitter, self._builder
        patches = builder.add(self._patches, self._times(builder.mul(strip, self._room), PATCH_BYTES))
        left = emitter.variable(unknown)
        with emitter.loop(emitter.call("llvm.ctpop.i64", I64, unknown)):
            bits = left.get()
            lowest = builder.and_(bits, builder.neg(bits))
            byte = emitter.call("llvm.ctpop.i64", I64, builder.sub(lowest, emitter.integer(1)))
            left.set(builder.xor(bits, lowest))
            # Of each lane of 16 bytes, the upper half is of the next pair.
            upper = builder.and_(builder.lshr(byte, emitter.integer(3)), emitter.integer(1))
            pair = builder.add(emitter.integer(2 * half), upper)
            lane = builder.and_(builder.lshr(byte, emitter.integer(1)), emitter.integer(0x18))
            inside = builder.or_(lane, builder.and_(byte, emitter.integer(7)))
            place = emitter.offset(self._pair_place(pair), (inside, NUMBER_BYTES))
            number = builder.zext(builder.load(builder.inttoptr(place, I16.as_pointer())), I64)
            vector = builder.add(builder.mul(pair, self._num_panels), panel)
            within = emitter.offset(inside, (vector, PAIR_NUMBERS))
            above = builder.or_(builder.shl(step, emitter.integer(STEP_SHIFT)), number)
            patch = builder.or_(above, builder.shl(within, emitter.integer(16)))
            count = num_patches.get()
            with builder.if_then(builder.icmp_signed("<", count, self._room)):
                own = emitter.offset(patches, (count, PATCH_BYTES))
                builder.store(patch, builder.inttoptr(own, I64.as_pointer()))
            num_patches.set(builder.add(count, emitter.integer(1)))

    def _pair_place(self, index: ir.Value) -> ir.Value:
        return self._emitter.offset(self._pairs, (index, VECTOR_BYTES))

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        return self._builder.mul(value, self._emitter.integer(factor))


def _all(value: int) -> ir.Constant:
    return ir.Constant(BYTES, [value] * BYTES.count)
