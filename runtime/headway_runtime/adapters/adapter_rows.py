"""Which rows of a step belong to which adapter, in the forms that products want. Numbers only, no weights.

Layers meet the rows of a step in order, some of them in pieces: so forms are made by piece, once for all
layers. Rows are gathered by adapter, and then into tiles of a few rows of one adapter, which a kernel works
on at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime import transfers

TILE_ROWS = 4
# Of a tile: the adapter's slot, the number of rows, and these.
TILE_NUMBERS = 2 + TILE_ROWS


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one adapter. rows: int64, ascending; None where they are all from `start` to below `end`."""

    slot: int
    start: int
    end: int
    rows: Tensor | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a step's rows. tiles: int64 [tiles, TILE_NUMBERS]. Rows count from the first of the piece."""

    groups: tuple[Group, ...]
    tiles: Tensor


class AdapterRows:
    """One step's rows. Valid until the next step's are made."""

    __slots__ = ("_device", "_pieces", "_slots")

    def __init__(self, slots: NDArray[numpy.int64], device: torch.device) -> None:
        """slots: of each row, 0 for none."""
        self._slots = slots
        self._device = device
        self._pieces: dict[tuple[int, int], Piece | None] = {}

    @property
    def num_rows(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> bytes:
        """Of each row, as bytes: what two steps are compared by."""
        return self._slots.tobytes()

    def piece(self, start: int, end: int) -> Piece | None:
        """Those from `start` to below `end`; None where none of them has an adapter."""
        place = (start, end)
        if place not in self._pieces:
            self._pieces[place] = self._made(self._slots[start:end])
        return self._pieces[place]

    def _made(self, slots: NDArray[numpy.int64]) -> Piece | None:
        by_slot = [(int(slot), numpy.flatnonzero(slots == slot)) for slot in numpy.unique(slots) if slot]
        if not by_slot:
            return None
        tiles = numpy.zeros(
            (sum(-(-len(rows) // TILE_ROWS) for _, rows in by_slot), TILE_NUMBERS), numpy.int64
        )
        groups, first = [], 0
        for slot, rows in by_slot:
            start, end = int(rows[0]), int(rows[-1]) + 1
            is_all = end - start == len(rows)
            own = None if is_all else transfers.sent_integers(rows, self._device)
            groups.append(Group(slot, start, end, own))
            count = -(-len(rows) // TILE_ROWS)
            padded = numpy.zeros(count * TILE_ROWS, numpy.int64)
            padded[: len(rows)] = rows
            tiles[first : first + count, 0] = slot
            tiles[first : first + count, 1] = TILE_ROWS
            tiles[first + count - 1, 1] = len(rows) - (count - 1) * TILE_ROWS
            tiles[first : first + count, 2:] = padded.reshape(count, TILE_ROWS)
            first += count
        return Piece(tuple(groups), torch.from_numpy(tiles))


def rows_of(chunks: Iterable[tuple[int, int]], num_rows: int, device: torch.device) -> AdapterRows | None:
    """chunks: each one's slot and number of rows, in their order; rows behind them belong to nobody.

    None where no chunk has an adapter.
    """
    told = list(chunks)
    if not any(slot for slot, _ in told):
        return None
    slots = numpy.zeros(num_rows, numpy.int64)
    start = 0
    for slot, count in told:
        slots[start : start + count] = slot
        start += count
    return AdapterRows(slots, device)
