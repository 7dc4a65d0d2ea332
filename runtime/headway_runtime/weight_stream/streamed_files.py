"""Weights from files to a GPU: no more of them in main memory than the threads' buffers.

What a model asks for is read in pieces by several threads (see lanes.py). What it asked for in one layer, it
will ask for in the next: the same tensors, and the same part of each. So with every tensor that is asked for,
that of the next layer is begun, up to a limit of memory, and is mostly there when its turn comes.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.weight_cuts import ALL, Part
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.weight_stream.lanes import PIECE_BYTES, Lanes, Ordering, Piece
from headway_runtime.weight_stream.tensor_places import TensorPlace, tensor_places

# On the device, of tensors that nobody has asked for yet. A layer of most models is smaller.
AHEAD_BYTES = 2 << 30
LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Coming:
    """A tensor under way."""

    part: Part
    tensor: Tensor
    pieces: "list[Future[Ordering | None]]"

    def arrive(self) -> None:
        """Wait until all is read, and have the current stream wait until it is copied. OSError."""
        for piece in self.pieces:
            point = piece.result()
            if point is not None:
                point.wait()


class StreamedFiles:
    """lanes: to the device. mark: a point behind all that the device was given so far, for copies to wait
    for: they write memory that others may have used before. indexed: the file of each tensor, as an index
    has it."""

    def __init__(
        self,
        paths: Sequence[Path],
        device: torch.device,
        lanes: Lanes,
        mark: Callable[[], Ordering | None],
        indexed: Mapping[str, Path] | None = None,
        *,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._device, self._lanes, self._mark = device, lanes, mark
        self._places = tensor_places(paths, indexed)
        self._ahead: dict[str, _Coming] = {}
        self._ahead_bytes, self._most_ahead_bytes = 0, ahead_bytes
        self._num_bytes = 0
        self._waited_seconds = 0.0
        self._descriptors: dict[Path, int] = {}
        try:
            for path in paths:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
        except OSError as error:
            self.close()
            raise ModelLoadError(f"{path}: cannot be read ({error}); copy the checkpoint again") from error

    @property
    def places(self) -> Mapping[str, Path]:
        return {name: place.path for name, place in self._places.items()}

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype_of(self, name: str) -> str:
        return self._places[name].dtype_name

    def read(self, name: str, part: Part = ALL) -> Tensor:
        coming = self._ahead.pop(name, None)
        if coming is not None:
            self._ahead_bytes -= coming.tensor.nbytes
            if coming.part != part:
                self._let_go(coming)
                coming = None
        if coming is None:
            coming = self._begin(name, part)
        self._begin_next(name, part)
        began_at = time.monotonic()
        try:
            coming.arrive()
        except OSError as error:
            path = self._places[name].path
            raise ModelLoadError(f"{path}: cannot be read ({error}); copy the checkpoint again") from error
        self._waited_seconds += time.monotonic() - began_at
        return coming.tensor

    def tell(self, timeline: StartTimeline) -> None:
        """Reading and copying are what was waited for, in the shares in which threads did both."""
        read, copy = self._lanes.read_seconds, self._lanes.copy_seconds
        share = self._waited_seconds / max(read + copy, 1e-9)
        both = dict.fromkeys(("read", "copy"), self._num_bytes)
        timeline.ended_in_parts({"read": read * share, "copy": copy * share}, "repack", both)

    def close(self) -> None:
        self._lanes.close()
        for coming in self._ahead.values():
            self._let_go(coming)
        self._ahead.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _let_go(self, coming: _Coming) -> None:
        """Of what nobody wants. Its memory may be given to others only behind the copies to it."""
        with contextlib.suppress(OSError, CancelledError):
            coming.arrive()

    def _begin_next(self, name: str, part: Part) -> None:
        """That of the next layer, if there is one, and room."""
        found = LAYER_NUMBER.search(name)
        if found is None:
            return
        following = f"{name[: found.start(1)]}{int(found[1]) + 1}{name[found.end(1) :]}"
        place, own = self._places.get(following), self._places[name]
        if place is None or following in self._ahead or (place.shape, place.dtype) != (own.shape, own.dtype):
            return
        if self._ahead_bytes + place.num_bytes <= self._most_ahead_bytes:
            coming = self._ahead[following] = self._begin(following, part)
            self._ahead_bytes += coming.tensor.nbytes

    def _begin(self, name: str, part: Part) -> _Coming:
        place = self._places[name]
        shape, first, run_bytes = _shape_of(place, part)
        tensor = torch.empty(shape, dtype=place.dtype, device=self._device)
        self._num_bytes += tensor.nbytes
        pieces: list[Future[Ordering | None]] = []
        if tensor.numel():
            target, after = tensor.reshape(-1).view(torch.uint8), self._mark()
            done = 0
            for piece in self._pieces(place, first, run_bytes, tensor.nbytes):
                pieces.append(self._lanes.move(piece, target[done : done + piece.num_bytes], after))
                done += piece.num_bytes
        return _Coming(part, tensor, pieces)

    def _pieces(self, place: TensorPlace, first: int, run_bytes: int, num_bytes: int) -> list[Piece]:
        """first: the first byte, in the tensor. run_bytes: of each row, in one piece."""
        descriptor, start = self._descriptors[place.path], place.offset + first
        if run_bytes == place.row_bytes:
            return [
                Piece(descriptor, start + at, 1, min(PIECE_BYTES, num_bytes - at), 0)
                for at in range(0, num_bytes, PIECE_BYTES)
            ]
        at_once, num_rows = max(1, PIECE_BYTES // run_bytes), num_bytes // run_bytes
        return [
            Piece(
                descriptor,
                start + row * place.row_bytes,
                min(at_once, num_rows - row),
                run_bytes,
                place.row_bytes,
            )
            for row in range(0, num_rows, at_once)
        ]


def _shape_of(place: TensorPlace, part: Part) -> tuple[tuple[int, ...], int, int]:
    """Of the part: its shape, its first byte in the tensor, and bytes of each row that are in one piece."""
    shape, row_bytes = place.shape, place.row_bytes
    if part.columns is not None:
        size, first = len(part.columns), part.columns.first * place.dtype.itemsize
        return (shape[0], size), first, size * place.dtype.itemsize
    if part.rows is not None:
        return (len(part.rows), *shape[1:]), part.rows.first * row_bytes, row_bytes
    return shape, 0, row_bytes
