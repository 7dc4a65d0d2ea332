"""bfloat16 weights in 12 bits each, from which every one of their bits comes back.

A number's lower byte, the last bit of its exponent and its mantissa, is as good as random and stays as it is.
Its upper byte, the sign and the rest of the exponent, takes few values among the weights of some outputs: a
strip has a table of the 8 magnitudes of it that are most frequent, and a code of 4 bits says the sign and
which. What is not in the table, one weight in some thousands where they are normally distributed, lies in a
list of patches, with its place and all of its 16 bits. (That exponents say little was seen before: DFloat11,
arXiv 2504.11651, and ZipNN, arXiv 2411.05239, whose codes are shorter, of different lengths, and slower.)

A strip is a few panels of 16 outputs. A step is eight inputs of them: for each panel 64 bytes of codes, those
of the first four inputs in the low nibbles, and twice 64 lower bytes. The bytes of a lane of 16 are two
inputs of four outputs, and then the next two inputs of them (as in `codes.py`), so that interleaving lower
and upper bytes gives pairs of inputs of 16 outputs, as `linear.py` multiplies them.
"""

from dataclasses import dataclass

import torch
from llvmlite import ir
from torch import Tensor

from headway_runtime.kernels.cpu.codes import BYTES, VECTOR_BYTES, WORDS
from headway_runtime.kernels.cpu.elements import BFLOAT16_PAIRS, I32
from headway_runtime.kernels.cpu.emitter import Emitter
from headway_runtime.kernels.cpu.strips import PANEL

STEP_INPUTS = 8
STEP_PAIRS = STEP_INPUTS // 2
STEP_BYTES = 3 * VECTOR_BYTES
# Of so many inputs, the steps that have patches are found at once.
GROUP_INPUTS = 256
GROUP_STEPS = GROUP_INPUTS // STEP_INPUTS
NUMBER_BYTES, LONG_BYTES = 2, 4
NIBBLE_BITS = 4
# Magnitudes that codes say; the upper byte's sign, and a code's.
NUM_KNOWN = 8
SIGN_BIT, CODE_SIGN = 0x80, 0x8
# The upper bytes of all 16 codes, over and over, for look-ups by more bits than a code has.
TABLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LosslessStrips:
    """A weight in 12 bits. num_panels: of a strip.

    codes: uint8 [strips, bytes]. tables: uint8 [strips, TABLE_BYTES].
    patches: int32, a weight's number among its step's pairs above its 16 bits, in the order of the steps.
    steps: int32, for each step that has patches which one of its strip it is, and a 0 behind them.
    patch_starts: int32, where each such step's patches begin. group_starts: int32 [strips * groups + 1],
    where each group's such steps begin.
    """

    num_panels: int
    num_inputs: int
    codes: Tensor
    tables: Tensor
    patches: Tensor
    steps: Tensor
    patch_starts: Tensor
    group_starts: Tensor

    @property
    def num_outputs(self) -> int:
        return len(self.codes) * self.num_panels * PANEL

    @property
    def nbytes(self) -> int:
        places = (self.patches, self.steps, self.patch_starts, self.group_starts)
        return self.codes.nbytes + self.tables.nbytes + sum(one.nbytes for one in places)


def decoded(weight: LosslessStrips) -> Tensor:
    """What was encoded, bit for bit: bfloat16 [outputs, inputs]."""
    num_strips, num_steps = len(weight.codes), weight.num_inputs // STEP_INPUTS
    steps = weight.codes.view(num_strips, num_steps, weight.num_panels, 3, VECTOR_BYTES)
    codes, lower = steps[:, :, :, 0], steps[:, :, :, 1:]
    nibbles = torch.stack((codes & 0xF, codes >> NIBBLE_BITS), 3)
    upper = weight.tables.gather(1, nibbles.view(num_strips, -1).long()).view(nibbles.shape)
    words = upper.to(torch.int16) << 8 | lower.to(torch.int16)
    # Of each step and panel, two halves of four lanes, in each two pairs of four outputs.
    by_lane = words.view(num_strips, num_steps, weight.num_panels, 2, 4, 2, 4, 2)
    numbers = by_lane.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(num_strips * num_steps, -1)
    num_groups = -(-weight.num_inputs // GROUP_INPUTS)
    group = torch.arange(num_strips * num_groups).repeat_interleave(weight.group_starts.diff())
    step = group // num_groups * num_steps + weight.steps[:-1]
    place = step.repeat_interleave(weight.patch_starts.diff())
    numbers[place, weight.patches.long() >> 16] = weight.patches.to(torch.int16)
    by_output = numbers.view(num_strips, -1, weight.num_panels * PANEL, 2).transpose(1, 2)
    return by_output.reshape(-1, weight.num_inputs).view(torch.bfloat16)


def widened(emitter: Emitter, step: ir.Value, table: ir.Value) -> list[ir.Value]:
    """Pairs of inputs of a panel, the first inputs first, without patches. table: a strip's."""
    builder = emitter.builder
    places = (emitter.offset(step, (emitter.integer(index), VECTOR_BYTES)) for index in range(3))
    codes, *lower = (load_bytes(emitter, place) for place in places)
    vectors = []
    for low, index in zip(lower, (codes, shifted(emitter, codes, -NIBBLE_BITS)), strict=True):
        # By six bits, so that it does not matter what lies above the four.
        upper = emitter.call("llvm.x86.avx512.permvar.qi.512", BYTES, table, index)
        for half in (0, 8):
            # The instruction that interleaves does so within each lane of 16 bytes.
            order = [
                lane + half + index + source
                for lane in range(0, 64, 16)
                for index in range(8)
                for source in (0, 64)
            ]
            mixed = builder.shuffle_vector(low, upper, ir.Constant(ir.VectorType(I32, 64), order))
            vectors.append(builder.bitcast(mixed, BFLOAT16_PAIRS))
    return vectors


def shifted(emitter: Emitter, value: ir.Value, bits: int) -> ir.Value:
    """Bytes as words, to the left; to the right with a minus. Bits cross from byte to byte of a word."""
    words = emitter.builder.bitcast(value, WORDS)
    shift = emitter.builder.shl if bits > 0 else emitter.builder.lshr
    return emitter.builder.bitcast(shift(words, ir.Constant(WORDS, [abs(bits)] * WORDS.count)), BYTES)


def load_bytes(emitter: Emitter, address: ir.Value) -> ir.Value:
    """64 of them, from a multiple of 64."""
    loaded = emitter.builder.load(emitter.builder.inttoptr(address, BYTES.as_pointer()))
    loaded.align = VECTOR_BYTES
    return loaded


def store_bytes(emitter: Emitter, value: ir.Value, address: ir.Value) -> None:
    """What `load_bytes` loads."""
    stored = emitter.builder.store(value, emitter.builder.inttoptr(address, BYTES.as_pointer()))
    stored.align = VECTOR_BYTES
