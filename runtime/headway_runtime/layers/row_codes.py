"""Rows that a kernel has made codes of 8 bits on its way, for products of codes with codes.

The largest magnitude of a row gets the largest code, as where such a product makes the codes itself. Only
products that want them are given them: who makes rows asks first (`wanted_codes`).
"""

from dataclasses import dataclass
from typing import TypeAlias, Union

import torch
from torch import Tensor

from headway_runtime.layers.coded_linear import CodedLinear, CodedRowsLinear
from headway_runtime.layers.linear import AnyLinear

Rows: TypeAlias = Union[Tensor, "RowCodes"]


@dataclass(frozen=True, slots=True)
class RowCodes:
    """codes: int8 or float8_e4m3fn [rows, size]. scales: float32 [rows]; a number is its code times them.

    dtype: of the numbers, and of what products make of them.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


def wanted_codes(linear: AnyLinear, num_rows: int) -> torch.dtype | None:
    """In what codes a layer takes so many rows; None: as numbers."""
    return linear.wanted_codes(num_rows) if isinstance(linear, CodedLinear | CodedRowsLinear) else None


def product_of(linear: AnyLinear, rows: Rows) -> Tensor:
    """Of rows as they were wanted."""
    if not isinstance(rows, RowCodes):
        return linear(rows)
    assert isinstance(linear, CodedLinear | CodedRowsLinear)
    return linear.of_codes(rows.codes, rows.scales, rows.dtype)
