"""Root mean square norms of rows with all that can be done on the way: one kernel, one pass over memory.

What it does to a row, of which all but the norm itself may be left out:

    delta -> norm of delta (Gemma's second norm of a block)
          -> added to the row of hidden states, in place
          -> norm of the sum
          -> codes of one byte and a scale per row, for a product of 8-bit numbers

Bytes, of one row of n bfloat16: 2n each for delta and hidden states read, hidden states and norm written:
8n (7n with codes), where separate kernels move 12n (and 5n more for the codes). The weight, 2n or 4n, is the
same for all rows and stays in the L2 cache. One program has a row, in registers: its three loads of 16 bytes
per thread go out before the first is needed, and no barrier but one reduction follows.

Measured on an H200: of 8,192 rows of 4096 91% of copy bandwidth (8 warps, 8 rows at once on a
multiprocessor are 190 KB in flight there, several times what latency asks for). At decode (1 to 128 rows) all
rows run at once and the time is that of a launch and one trip to memory, 1.7 us, 2.7 for 256.
"""

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from headway_runtime.kernels.triton.codes import (
    EXACT,
    KEPT_CAPABILITIES,
    STORED_TYPES,
    as_bytes,
    codes_of,
    kept_as,
    magnitude_bits,
    row_codes_by_torch,
    row_scale,
)
from headway_runtime.kernels.triton.launch import (
    DEFAULT,
    CompileCase,
    configuration,
    configurations,
    gpu_of,
    split_options,
)
from headway_runtime.kernels.triton.overlap import launched_early, let_next_begin, wait_for_last
from headway_runtime.kernels.triton.rounding import narrow
from headway_runtime.kernels.triton.row_codes import RowCodes

# More numbers in a row than a program holds in registers (16 warps, 64 a thread).
MOST_NUMBERS = 32768


@triton.jit
def norm_kernel(
    hidden_pointer,
    delta_pointer,
    delta_weight_pointer,
    weight_pointer,
    out_pointer,
    scale_pointer,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
    KEPT: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One program per row. Without ADDS: the norm of the row of hidden states, which stays as it is."""
    let_next_begin(overlaps)
    columns = tl.arange(0, BLOCK)
    is_real = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    stored = hidden_pointer.dtype.element_ty
    weight = tl.zeros((BLOCK,), tl.float32)
    if not NORMS_DELTA:
        weight = tl.load(weight_pointer + columns, mask=is_real, other=0.0).to(tl.float32)
    wait_for_last(overlaps)
    x = tl.load(hidden_pointer + places, mask=is_real, other=0.0).to(tl.float32)
    if ADDS:
        delta = tl.load(delta_pointer + places, mask=is_real, other=0.0).to(tl.float32)
        if NORMS_DELTA:
            own = tl.load(delta_weight_pointer + columns, mask=is_real, other=0.0).to(tl.float32)
            delta *= tl.rsqrt(tl.sum(delta * delta, 0) / SIZE + epsilon)
            delta = narrow(delta * own, stored).to(tl.float32)
        # What is normed is what later layers read.
        rounded = narrow(x + delta, stored)
        tl.store(hidden_pointer + places, rounded, mask=is_real)
        x = rounded.to(tl.float32)
    if NORMS_DELTA:
        # Where three rows are in registers already, not before there is room for it.
        weight = tl.load(weight_pointer + columns, mask=is_real, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * weight
    if KEPT == "plain":
        tl.store(out_pointer + places, narrow(normed, stored), mask=is_real)
    else:
        # As if it had been written, and read by a kernel that makes codes.
        normed = narrow(normed, stored).to(tl.float32)
        scale = row_scale(tl.max(magnitude_bits(normed), 0), KEPT)
        codes = codes_of(tl.div_rn(normed, scale + tl.zeros_like(normed)), KEPT)
        tl.store(out_pointer + places, codes, mask=is_real)
        tl.store(scale_pointer + tl.program_id(0), scale)


class Norm:
    """The launcher for rows of one size. Rows are contiguous."""

    __slots__ = ("_epsilon", "_size")

    def __init__(self, size: int, epsilon: float) -> None:
        assert size <= MOST_NUMBERS
        self._size = size
        self._epsilon = epsilon

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [rows, size]."""
        out = torch.empty_like(x)
        self._launch(x, None, None, weight, out, None)
        return out

    def add_and_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Adds `delta` to `x`, in place; returns the norm of the sum."""
        out = torch.empty_like(x)
        self._launch(x, delta, None, weight, out, None)
        return out

    def norm_add_and_norm(self, x: Tensor, delta: Tensor, delta_weight: Tensor, weight: Tensor) -> Tensor:
        """The same of the norm of `delta`, which stays as it is."""
        out = torch.empty_like(x)
        self._launch(x, delta, delta_weight, weight, out, None)
        return out

    def codes(
        self,
        x: Tensor,
        delta: Tensor | None,
        delta_weight: Tensor | None,
        weight: Tensor,
        dtype: torch.dtype,
    ) -> RowCodes:
        """The same as codes; without `delta` nothing is added."""
        out = torch.empty_like(x, dtype=dtype)
        scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        self._launch(x, delta, delta_weight, weight, out, scales)
        return RowCodes(out, scales, x.dtype)

    def _launch(
        self,
        x: Tensor,
        delta: Tensor | None,
        delta_weight: Tensor | None,
        weight: Tensor,
        out: Tensor,
        scales: Tensor | None,
    ) -> None:
        assert x.is_contiguous()
        assert x.shape[1] == self._size
        assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
        if len(x) == 0:
            return
        gpu = gpu_of(x.device)
        block = triton.next_power_of_2(self._size)
        kept = kept_as(out.dtype, gpu)
        norm_kernel[(len(x),)](
            x,
            delta,
            delta_weight,
            weight,
            as_bytes(out),
            scales,
            self._epsilon,
            SIZE=self._size,
            BLOCK=block,
            ADDS=delta is not None,
            NORMS_DELTA=delta_weight is not None,
            KEPT=kept,
            **configuration("norm", str(block), gpu),
            **launched_early(gpu),
            **({} if kept == "plain" else EXACT),
        )


def norm_by_torch(
    x: Tensor,
    delta: Tensor | None,
    delta_weight: Tensor | None,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype | None = None,
) -> Tensor | RowCodes:
    """The reference. dtype: of codes, if any; `x` is changed if there is a delta."""

    def norm(rows: Tensor, own: Tensor) -> Tensor:
        return functional.rms_norm(rows.float(), own.shape, own.float(), epsilon).to(rows.dtype)

    if delta is not None:
        x.add_(delta if delta_weight is None else norm(delta, delta_weight))
    normed = norm(x, weight)
    return normed if dtype is None else row_codes_by_torch(normed, dtype)


def _cases() -> list[CompileCase]:
    """All that a layer launches, in bfloat16, of every configuration; the class is the size."""
    cases = []
    for one in configurations("norm"):
        block = 4096 if one.shape_class == DEFAULT else int(one.shape_class)
        constants, options = split_options(one.values)
        for kept, capabilities in KEPT_CAPABILITIES.items():
            variants = (("", False, False), (" adds", True, False), (" norms", True, True))
            for label, adds, norms_delta in variants:
                signature = {
                    "hidden_pointer": "*bf16",
                    "weight_pointer": "*fp32" if norms_delta else "*bf16",
                    "epsilon": "fp32",
                    "out_pointer": STORED_TYPES[kept] or "*bf16",
                }
                flags = {"ADDS": adds, "NORMS_DELTA": norms_delta, "KEPT": kept}
                absent: dict[str, None] = {}
                optional = {"delta": (adds, "*bf16"), "delta_weight": (norms_delta, "*fp32")}
                optional["scale"] = (kept != "plain", "*fp32")
                for name, (is_there, kind) in optional.items():
                    if is_there:
                        signature[f"{name}_pointer"] = kind
                    else:
                        absent[f"{name}_pointer"] = None
                cases.append(
                    CompileCase(
                        f"{one.label} {kept}{label}",
                        norm_kernel,
                        signature,
                        {"SIZE": block, "BLOCK": block, **flags, **absent, **constants},
                        {**options, **({} if kept == "plain" else EXACT)},
                        tuple(each for each in one.capabilities if each in capabilities),
                    )
                )
    return cases


COMPILED = _cases()
