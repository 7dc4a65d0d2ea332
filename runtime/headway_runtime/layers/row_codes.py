"""Rows that a kernel has made codes of 8 bits on its way, for products of codes with codes.

The largest magnitude of a row gets the largest code, as where such a product makes the codes itself. Only
products that want them are given them: who makes rows asks first (`wanted_codes`).
"""

from typing import TypeAlias

import torch
from torch import Tensor

from headway_runtime.kernels.triton.row_codes import RowCodes
from headway_runtime.layers.coded_linear import CodedLinear, CodedRowsLinear
from headway_runtime.layers.linear import AnyLinear

Rows: TypeAlias = Tensor | RowCodes


def wanted_codes(linear: AnyLinear, num_rows: int) -> torch.dtype | None:
    """In what codes a layer takes so many rows; None: as numbers."""
    return linear.wanted_codes(num_rows) if isinstance(linear, CodedLinear | CodedRowsLinear) else None


def product_of(linear: AnyLinear, rows: Rows) -> Tensor:
    """Of rows as they were wanted."""
    if not isinstance(rows, RowCodes):
        return linear(rows)
    assert isinstance(linear, CodedLinear | CodedRowsLinear)
    return linear.of_codes(rows.codes, rows.scales, rows.dtype)
