"""What this processor can do, by LLVM's names. Imports no torch."""

from functools import cache

from llvmlite import binding as llvm


@cache
def features() -> dict[str, bool]:
    return dict(llvm.get_host_cpu_features())


def has_features(*names: str) -> bool:
    """Whether the processor has all of these, named as LLVM names them."""
    return all(features().get(name) for name in names)


def packs_bfloat16() -> bool:
    """Whether oneDNN, and so PyTorch, puts bfloat16 weights into a layout of its own.

    It has products of them from AVX-512 on, on processors with AVX-VNNI-INT8 and AVX-NE-CONVERT, and on Arm
    ones with bf16 (oneDNN's documentation of data types). `layers.linear.can_pack` finds the same by trying.
    """
    return (
        has_features("avx512bw", "avx512vl", "avx512dq")
        or has_features("avxvnniint8", "avxneconvert")
        or has_features("neon", "bf16")
    )


def multiplies_halves() -> bool:
    """Whether there are products of float16: AVX-512 FP16 or AMX's, and Arm's."""
    return has_features("avx512fp16") or has_features("amx-fp16") or has_features("neon", "fullfp16")


def reads_12_bits() -> bool:
    """Whether products of bfloat16 weights in 12 bits each (`lossless_codes`) are the fastest."""
    return multiplies_pairs() and has_features("avx512bw", "avx512vbmi")


def multiplies_pairs() -> bool:
    """Whether products of pairs are the fastest: it has the instruction, and no matrix unit (AMX)."""
    return has_features("avx512bf16") and not has_features("amx-bf16")
