"""What tokens may attend to, as numbers that are added to their scores: for PyTorch's operators."""

import math

import torch
from torch import Tensor


class Masks:
    """Of tokens at `positions` against the tokens at `context`; made when a layer first asks, then kept.

    positions, context: integers on the device. dtype: of the masks.
    """

    __slots__ = ("_context", "_dtype", "_made", "_positions")

    def __init__(self, positions: Tensor, context: Tensor, dtype: torch.dtype) -> None:
        self._positions = positions
        self._context = context
        self._dtype = dtype
        self._made: dict[int | None, Tensor] = {}

    def within(self, window: int | None) -> Tensor:
        """0 where a token attends, minus infinity elsewhere: [positions, context]. window: of the layer."""
        mask = self._made.get(window)
        if mask is None:
            positions = self._positions.unsqueeze(1)
            hidden = self._context > positions
            if window is not None:
                hidden |= self._context <= positions - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
            self._made[window] = mask.masked_fill_(hidden, -math.inf)
        return mask

    @property
    def num_made(self) -> int:
        return len(self._made)
