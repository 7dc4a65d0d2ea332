"""Rows as codes of 8 bits, which one kernel makes on its way and another multiplies. Imports no Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowCodes:
    """codes: int8 or float8_e4m3fn [rows, size]. scales: float32 [rows]; a number is its code times them.

    dtype: of the numbers, and of what products make of them.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
