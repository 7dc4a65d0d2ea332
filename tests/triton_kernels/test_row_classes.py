"""Whatever the GPU, a product of few rows computes a tile of few rows."""

from collections.abc import Iterator

import pytest

from headway_runtime.kernels.triton.launch import CAPABILITIES, DEFAULT, Gpu, configuration, tabled_kernels
from headway_runtime.kernels.triton.row_products import ROW_CLASSES, class_of_rows

# Rows that tl.dot takes at least, where they are its left operand; products whose rows are columns take 8.
LEAST_ROWS = 16
# Products that look their rows' class up. `gated_product` has classes of its own.
KERNELS = [
    name
    for name in tabled_kernels(DEFAULT)
    if "product" in name and name not in ("thin_product", "gated_product")
]
ROWS_NAMES = ("block_rows", "BLOCK_ROWS")
OTHER_GPU = "nvidia_l40s"


def tile_rows(kernel: str, rows: int, gpu: str) -> Iterator[int]:
    values = configuration(kernel, class_of_rows(rows), Gpu(gpu, 90, 132))
    return (values[name] for name in ROWS_NAMES if name in values)


@pytest.mark.parametrize("gpu", [*CAPABILITIES, OTHER_GPU])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tile_has_at_most_twice_the_rows_of_its_class(kernel: str, gpu: str) -> None:
    for rows in ROW_CLASSES:
        (found,) = tile_rows(kernel, rows, gpu)
        assert found <= max(LEAST_ROWS, 2 * rows), (rows, found)


@pytest.mark.parametrize("gpu", [*CAPABILITIES, OTHER_GPU])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_one_row_times_codes_is_a_tile_of_eight(form: str, gpu: str) -> None:
    assert list(tile_rows(f"coded_product_{form}", 1, gpu)) == [8]
