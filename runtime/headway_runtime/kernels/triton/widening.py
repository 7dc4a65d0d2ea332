"""Codes of 4 and 8 bits become numbers that tensor cores multiply.

Owns the arithmetic of single codes, each exact in the type it becomes. Codes come in words of 16 bits, four
nibbles or two bytes, lowest first; a GPU's register holds two words, and each instruction below works on a
code of both. The compiler would make one of each code, and conversions run at an eighth of the speed of the
rest.

int4: a nibble set into the mantissa of 128 (bfloat16) or 1024 (float16) is that plus the code, and an
    addition takes it and the zero point away: 3 instructions for 2 codes.
int8 as bfloat16: the lower 7 bits set into the mantissa of 128, less 128, or less 256 for negative ones,
    which is 128 with the sign bit set into its exponent. As float16: as int4.
fp8 (e4m3): sign, exponent and mantissa are set at their places in the wider number, whose exponent counts
    from elsewhere; a product with a power of two brings it back, also where the exponent is 0.

Knows no layout and no scales.
"""

import triton
import triton.language as tl

from headway_runtime.kernels.triton.launch import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


def _nibble_instructions(magic: int, addition: str) -> str:
    """Words $4, what to add $5: numbers $0 to $3."""
    lines = []
    for plane in range(4):
        if plane:
            lines.append(f"shr.u32 word, $4, {4 * plane};")
        source = "word" if plane else "$4"
        lines.append(f"lop3.b32 word, {source}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA;")
        lines.append(addition.format(out=f"${plane}"))
    return _block(*lines)


def _byte_instructions(*of_plane: str) -> str:
    """Words $2: numbers $0 and $1, of the lower and the upper bytes."""
    first, second = (
        [line.format(out=f"${plane}", source=source) for line in of_plane]
        for plane, source in enumerate(("$2", "word"))
    )
    return _block(*first, "shr.u32 word, $2, 8;", *second)


def _block(*lines: str) -> str:
    """Before sm_90 bfloat16 has no addition but one after a product, at the same cost."""
    return (
        "{ .reg .b32 word, a, b, one, minus_one, minus_zero; mov.b32 one, 0x3F803F80; "
        "mov.b32 minus_one, 0xBF80BF80; mov.b32 minus_zero, 0x80008000; " + " ".join(lines) + " }"
    )


BFLOAT16_NIBBLES = tl.constexpr(_nibble_instructions(0x4300, "fma.rn.bf16x2 {out}, word, one, $5;"))
FLOAT16_NIBBLES = tl.constexpr(_nibble_instructions(0x6400, "add.rn.f16x2 {out}, word, $5;"))
BFLOAT16_INT8 = tl.constexpr(
    _byte_instructions(
        "lop3.b32 a, {source}, 0x007F007F, 0x43004300, 0xEA;",
        "lop3.b32 b, {source}, 0x00800080, 0x43004300, 0xEA;",
        "fma.rn.bf16x2 {out}, b, minus_one, a;",
    )
)
FLOAT16_INT8 = tl.constexpr(
    _byte_instructions(
        "lop3.b32 a, {source}, 0x00FF00FF, 0x64806480, 0x6A;",
        "mov.b32 b, 0xE480E480;",
        "add.rn.f16x2 {out}, a, b;",
    )
)
BFLOAT16_FP8 = tl.constexpr(
    _byte_instructions(
        "shl.b32 a, {source}, 4;",
        "shl.b32 b, {source}, 8;",
        "and.b32 b, b, 0x80008000;",
        "lop3.b32 a, a, 0x07F007F0, b, 0xEA;",
        "mov.b32 b, 0x7B807B80;",
        "fma.rn.bf16x2 {out}, a, b, minus_zero;",
    )
)
FLOAT16_FP8 = tl.constexpr(
    _byte_instructions(
        "shl.b32 a, {source}, 7;",
        "shl.b32 b, {source}, 8;",
        "and.b32 b, b, 0x80008000;",
        "lop3.b32 a, a, 0x3F803F80, b, 0xEA;",
        "mov.b32 b, 0x5C005C00;",
        "mul.rn.f16x2 {out}, a, b;",
    )
)
FOUR_OF_TWO = tl.constexpr("=&r,=&r,=&r,=&r,r,r")
TWO_OF_ONE = tl.constexpr("=&r,=&r,r")


@triton.jit
def nibbles(words, zeros, dtype: tl.constexpr):
    """The four codes of each word of 16 bits less its zero point, lowest first, as dtype.

    words: int16. zeros: float32, of the same shape: whole numbers from -112 to 112.
    """
    if _INTERPRETED or dtype == tl.float32:
        one = ((words & 15).to(tl.float32) - zeros).to(dtype)
        two = (((words >> 4) & 15).to(tl.float32) - zeros).to(dtype)
        three = (((words >> 8) & 15).to(tl.float32) - zeros).to(dtype)
        four = (((words >> 12) & 15).to(tl.float32) - zeros).to(dtype)
    elif dtype == tl.bfloat16:
        one, two, three, four = tl.inline_asm_elementwise(
            BFLOAT16_NIBBLES,
            FOUR_OF_TWO,
            [words, (-128.0 - zeros).to(dtype)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        one, two, three, four = tl.inline_asm_elementwise(
            FLOAT16_NIBBLES,
            FOUR_OF_TWO,
            [words, (-1024.0 - zeros).to(dtype)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return one, two, three, four


@triton.jit
def two_bytes(words, form: tl.constexpr, dtype: tl.constexpr):
    """The two codes of each word of 16 bits, lowest first, as dtype. words: int16. form: int8 or fp8, of
    which what is no number becomes 480."""
    if _INTERPRETED or dtype == tl.float32:
        one = _byte(words.to(tl.int32) & 0xFF, form).to(dtype)
        two = _byte((words.to(tl.int32) >> 8) & 0xFF, form).to(dtype)
    elif dtype == tl.bfloat16:
        one, two = tl.inline_asm_elementwise(
            BFLOAT16_INT8 if form == "int8" else BFLOAT16_FP8,
            TWO_OF_ONE,
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        one, two = tl.inline_asm_elementwise(
            FLOAT16_INT8 if form == "int8" else FLOAT16_FP8,
            TWO_OF_ONE,
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return one, two


@triton.jit
def _byte(bits, form: tl.constexpr):
    """float32 of 0 to 255 in int32."""
    if form == "int8":
        number = ((bits ^ 0x80) - 0x80).to(tl.float32)
    else:
        places = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        number = places.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return number


@triton.jit
def above_zeros(numbers, zeros):
    """Codes less their rows' zero points, which are float32. The interpreter has no bfloat16 arithmetic."""
    if _INTERPRETED:
        result = (numbers.to(tl.float32) - zeros[:, None]).to(numbers.dtype)
    else:
        result = numbers - zeros.to(numbers.dtype)[:, None]
    return result


@triton.jit
def scale_and_zero(words, meaning: tl.constexpr, usual_zero: tl.constexpr):
    """Both as float32. words: of `CodedWeight.meanings`."""
    if meaning == "float32":
        scales = words
        zeros = tl.zeros_like(words) + usual_zero
    else:
        halves = words.to(tl.int16)
        if meaning == "float16":
            scales = halves.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            scales = halves.to(tl.bfloat16, bitcast=True).to(tl.float32)
        zeros = (words >> 16).to(tl.float32)
    return scales, zeros


@triton.jit
def float8_operand(codes):
    """float8_e4m3 as it is; the interpreter, which has none, gets bytes and makes them float32."""
    return _byte(codes.to(tl.int32), "fp8") if _INTERPRETED else codes
