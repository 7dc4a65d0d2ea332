"""One tile of weight @ x.T where the weight is 4- or 8-bit codes: what the products of `coded_product.py` and
`expert_product.py` do alike. Knows neither where a tile's rows lie nor where its sums go.

Of a merged gate and up projection a tile takes outputs of both by turns, so that it can end in
activation(gate) * up: a launch less, and a trip of twice as many numbers through memory.
"""

import triton
import triton.language as tl

from headway_runtime.kernels.triton.gate import activated
from headway_runtime.kernels.triton.launch import dot
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.widening import above_zeros, nibbles, scale_and_zero, two_bytes


@triton.jit
def sums_of_codes(  # noqa: C901 (branches on constants)
    x_rows,
    is_row,
    codes,
    meanings,
    own,
    num_outputs,
    num_inputs,
    first,
    end,
    form: tl.constexpr,
    meaning: tl.constexpr,
    group_size: tl.constexpr,
    scale_rows: tl.constexpr,
    fills_blocks: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
):
    """float32 [block_outputs, block_rows] over the inputs' blocks from `first` to before `end`.

    x_rows: where each row begins, [block_rows]. is_row: [1, block_rows], which are read. own: outputs, all of
    which there are. The rest: `CodedWeight`.
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    usual_zero: tl.constexpr = 8.0 if form == "int4" else 0.0
    # Words that are loaded at once for one product each of their codes, and how many loads a block takes.
    has_small_groups: tl.constexpr = group_size != 0 and group_size < 128
    num_words: tl.constexpr = (group_size // 2 if has_small_groups else 64) if form == "fp8" else 32
    codes_per_word: tl.constexpr = 4 if form == "int4" else 2
    num_loads: tl.constexpr = 128 // num_words // codes_per_word
    places = tl.arange(0, num_words)
    if form == "fp8":
        codes_at = codes + own.to(tl.int64)[:, None] * (num_inputs // 2) + places[None, :]
        block_stride = 64
    else:
        codes_at = codes + own[:, None] * (32 * num_loads) + places[None, :]
        block_stride = num_outputs.to(tl.int64) * (32 * num_loads)
    num_meanings = tl.cdiv(num_outputs, scale_rows)
    meanings_at = meanings + own // scale_rows
    x_at = x_rows[None, :] + places[:, None]
    total = tl.zeros([block_outputs, block_rows], tl.float32)
    # A scale reaches no operand of a product, so the compiler does not load it ahead; here that is done.
    group_blocks: tl.constexpr = group_size // 128 if group_size >= 128 else 1
    ahead = tl.load(meanings_at + (first // group_blocks if group_size >= 128 else 0) * num_meanings)
    scales, zeros = scale_and_zero(ahead, meaning, usual_zero)

    for block in range(first, end):
        if group_size >= 128:
            scales, zeros = scale_and_zero(ahead, meaning, usual_zero)
            ahead = tl.load(meanings_at + tl.minimum(block + 1, end - 1) // group_blocks * num_meanings)
            if meaning != "float32":
                words = tl.load(meanings_at + block // group_blocks * num_meanings)
                zeros = scale_and_zero(words, meaning, usual_zero)[1]
        part = total if group_size == 0 else tl.zeros_like(total)
        for load in tl.static_range(num_loads):
            if form == "fp8" and not fills_blocks:
                is_code = (block * 64 + load * num_words + places < num_inputs // 2)[None, :]
                codes_of = tl.load(codes_at + block * block_stride + load * num_words, mask=is_code, other=0)
            else:
                codes_of = tl.load(codes_at + block * block_stride + load * num_words)
            if form == "int4":
                # Zero points that differ from plane to plane are subtracted later.
                known = tl.zeros_like(zeros) if has_small_groups else zeros
                planes = nibbles(codes_of, tl.broadcast_to(known[:, None], [block_outputs, 32]), dtype)
            else:
                planes = two_bytes(codes_of, form, dtype)
            if form == "fp8":
                # A word has neighbours, so one product is of even inputs and one of odd ones.
                own_inputs = block * 128 + load * (2 * num_words) + tl.arange(0, 2 * num_words)
                pairs = tl.load(
                    x_rows[None, :] + own_inputs[:, None],
                    mask=is_row if fills_blocks else is_row & (own_inputs < num_inputs)[:, None],
                    other=0.0,
                )
                halves = tl.split(tl.permute(tl.reshape(pairs, [num_words, 2, block_rows]), (0, 2, 1)))
            for plane in tl.static_range(codes_per_word):
                if form == "fp8":
                    numbers = halves[plane]
                else:
                    inputs = block * 128 + (load * codes_per_word + plane) * 32
                    is_read = is_row if fills_blocks else is_row & (inputs + places < num_inputs)[:, None]
                    numbers = tl.load(x_at + inputs, mask=is_read, other=0.0)
                weight = planes[plane]
                if has_small_groups and form != "fp8":
                    own_words = tl.load(meanings_at + inputs // group_size * num_meanings)
                    scales, zeros = scale_and_zero(own_words, meaning, usual_zero)
                    weight = above_zeros(weight, zeros)
                    total += dot(weight, numbers, tl.zeros_like(total)) * scales[:, None]
                else:
                    if form == "int8" and meaning != "float32":
                        weight = above_zeros(weight, zeros)
                    part = dot(weight, numbers, part)
            if has_small_groups and form == "fp8":
                # Each load is a group.
                own_words = tl.load(meanings_at + (block * num_loads + load) * num_meanings)
                total += part * scale_and_zero(own_words, meaning, usual_zero)[0][:, None]
                part = tl.zeros_like(total)
        if group_size == 0:
            total = part
        elif group_size >= 128:
            total += part * scales[:, None]
    if group_size == 0:
        total *= scales[:, None]
    return total


@triton.jit
def by_turns(outputs, num_outputs):
    """Of gate and up, halves of a weight, the one and the other; those past the end are the last ones."""
    half = num_outputs // 2
    return tl.minimum(outputs // 2, half - 1) + outputs % 2 * half


@triton.jit
def gated(
    total,
    activation: tl.constexpr,
    dtype: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
):
    """float32 [block_outputs / 2, block_rows] of sums by turns; both are rounded as if stored before."""
    pairs = tl.reshape(total, [block_outputs // 2, 2, block_rows])
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    return activated(narrow(gate, dtype).to(tl.float32), activation) * narrow(up, dtype).to(tl.float32)
