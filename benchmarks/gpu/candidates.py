"""What is tried for each kernel and class of shapes. Kernels whose choice follows from how they work have
their candidates in their own files; here are those of the others."""

from collections.abc import Mapping, Sequence

from headway_runtime.kernels.triton import (
    coded_plain,
    coded_product,
    coded_rows,
    coded_rows_product,
    decode_candidates,
    expert_inputs,
    expert_order,
    expert_product,
    expert_rows_product,
    expert_sum,
    paged_decode,
    paged_prefill,
    thin_product,
)
from headway_runtime.kernels.triton.launch import DEFAULT
from headway_runtime.kernels.triton.row_products import MANY_ROWS

Values = Mapping[str, int]
# Kernel -> class of shapes -> what is tried; "default" for classes that are not named.
Classes = Mapping[str, Sequence[Values]]


def _warps(*counts: int) -> list[dict[str, int]]:
    return [{"num_warps": count} for count in counts]


def _tiles(name: str, sizes: Sequence[int], warps: Sequence[int]) -> list[dict[str, int]]:
    return [{name: size, "num_warps": count} for size in sizes for count in warps]


def _gated(rows: int) -> list[dict[str, int]]:
    """Tiles of that many rows; outputs count twice, for gate and up."""
    return [
        {
            "BLOCK_ROWS": rows,
            "BLOCK_OUTPUTS": outputs,
            "BLOCK_INPUTS": inputs,
            "num_warps": warps,
            "num_stages": stages,
        }
        for outputs, warps in ((16, 2), (16, 4), (32, 4), (32, 8), (64, 4), (64, 8))
        for inputs in (64, 128, 256)
        for stages in (3, 4, 6)
        # Shared memory that the stages take: more than a multiprocessor has is not worth compiling.
        if (rows + 2 * outputs) * inputs * 2 * stages <= 220 * 1024
    ]


def _with_rows(name: str, rows: int, own: Sequence[Values]) -> list[Values]:
    """The same with other tiles of rows; each once."""
    found: list[Values] = []
    for one in own:
        changed = {**one, name: rows}
        if changed not in found:
            found.append(changed)
    return found


def _by_rows(name: str, few: Sequence[Values], many: Sequence[Values]) -> Classes:
    """Of products: classes of rows, of which the tables of their files name two."""
    return {
        **{f"rows_{rows}": _with_rows(name, 16, few) for rows in (1, 8, 16)},
        "rows_32": _with_rows(name, 32, few),
        "rows_64": [*_with_rows(name, 64, few), *_with_rows(name, 64, many)],
        MANY_ROWS: many,
    }


_EXPERTS = _by_rows("block_rows", expert_product.CANDIDATES["rows_8"], expert_product.CANDIDATES[MANY_ROWS])
_EXPERT_ROWS = expert_rows_product.CANDIDATES
_CODED_ROWS = coded_rows_product.CANDIDATES
CANDIDATES: dict[str, Classes] = {
    paged_decode.KERNEL: decode_candidates.CANDIDATES,
    paged_decode.WIDE_KERNEL: decode_candidates.WIDE_CANDIDATES,
    "paged_prefill": paged_prefill.CANDIDATES,
    **dict.fromkeys(coded_product.KERNELS.values(), coded_product.CANDIDATES),
    "coded_rows_product": _by_rows("BLOCK_ROWS", _CODED_ROWS["rows_16"], _CODED_ROWS[MANY_ROWS]),
    **dict.fromkeys(expert_product.KERNELS.values(), _EXPERTS),
    expert_product.KERNELS["float32"]: {DEFAULT: expert_product.FLOAT32_CANDIDATES},
    expert_rows_product.KERNEL: _by_rows("block_rows", _EXPERT_ROWS["rows_8"], _EXPERT_ROWS[MANY_ROWS]),
    expert_inputs.ORDER_KERNEL: expert_inputs.CANDIDATES,
    expert_inputs.CODES_KERNEL: expert_inputs.CANDIDATES,
    thin_product.KERNEL: thin_product.CANDIDATES,
    "gated_product": {str(rows): _gated(rows) for rows in (16, 32, 64)},
    "coded_plain": coded_plain.CANDIDATES,
    "coded_rows": coded_rows.CANDIDATES,
    **{kernel: {DEFAULT: values} for kernel, values in expert_order.CANDIDATES.items()},
    "expert_sum": expert_sum.CANDIDATES,
    "norm": {DEFAULT: _warps(2, 4, 8, 16)},
    "gate": {DEFAULT: _tiles("BLOCK", (512, 1024, 2048, 4096), (4, 8))},
    "gate_codes": {DEFAULT: _warps(4, 8, 16)},
    "rotate_and_store": {DEFAULT: _tiles("TILE", (256, 512, 1024, 2048), (2, 4, 8))},
    "place_step": {DEFAULT: _tiles("TILE", (64, 128, 256), (1, 2, 4))},
    "vocabulary_blocks": {DEFAULT: _tiles("TILE", (1024, 2048, 4096, 8192), (4, 8))},
    "draw": {DEFAULT: _tiles("TILE", (1024, 2048, 4096), (8, 16))},
    "edit_logits": {
        DEFAULT: [
            {"BLOCK": block, "ENTRIES": entries, "num_warps": warps}
            for block in (2048, 4096, 8192)
            for entries in (256, 512)
            for warps in (4, 8)
        ]
    },
    "top_logprobs": {DEFAULT: _tiles("TILE", (1024, 2048, 4096), (4, 8, 16))},
}


def candidates_of(kernel: str, shape_class: str) -> Sequence[Values]:
    """In no order. A class without any of its own has the default ones, else none."""
    classes = CANDIDATES.get(kernel, {})
    return classes.get(shape_class, classes.get(DEFAULT, ()))
