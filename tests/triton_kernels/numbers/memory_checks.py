"""Holds interpreted kernels to the memory that they were given.

Whatever lies beside a tensor is memory of the same process, so a kernel that reads past an end mostly gets
some number and no error, and on a GPU now and then a fault. Here each load, store and atomic operation is
looked up among the storages of the launch's tensors; lanes that are masked out access nothing.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from triton.runtime import interpreter


class OutsideOfTensorsError(Exception):
    """A kernel's access to memory of none of its tensors."""


class GivenMemory:
    """Storages of tensors, as stretches of addresses."""

    def __init__(self, given: Iterable[object]) -> None:
        found = {
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in (one.untyped_storage() for one in _tensors(given))
            if storage.nbytes()
        }
        self._starts = [start for start, _ in sorted(found)]
        self._ends = [end for _, end in sorted(found)]

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """pointers, mask: as the interpreter has them. OutsideOfTensorsError."""
        addresses = numpy.asarray(pointers.data)
        if not mask.data.all():
            addresses = addresses[numpy.broadcast_to(mask.data.astype(bool), addresses.shape)]
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first, last = int(addresses.min()), int(addresses.max())
        if self._end_of(first) >= last + size:
            return
        for address in numpy.unique(addresses).tolist():
            if self._end_of(address) < address + size:
                raise OutsideOfTensorsError(f"{what} of {size} bytes, {self._place(address)}")

    def _end_of(self, address: int) -> int:
        """Of the storage that holds this address; 0 if none does."""
        place = bisect_right(self._starts, address) - 1
        return self._ends[place] if place >= 0 and address < self._ends[place] else 0

    def _place(self, address: int) -> str:
        past = [(address - end, end - start) for start, end in zip(self._starts, self._ends, strict=True)]
        distance, length = min((one for one in past if one[0] >= 0), default=(None, None))
        return (
            "before all tensors" if distance is None else f"{distance} bytes past the end of one of {length}"
        )


def _tensors(given: Iterable[object]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)


@contextmanager
def checked_memory() -> Iterator[None]:
    """Meanwhile each access of an interpreted kernel is checked, and a wrong one ends its launch."""
    builder: Any = interpreter.InterpreterBuilder
    executor: Any = interpreter.GridExecutor
    launch = executor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store
    update = builder.create_atomic_rmw
    memory = GivenMemory([])

    def launched(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal memory
        memory = GivenMemory([*given, *named.values()])
        return launch(self, *given, **named)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.check("a load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check("a store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def updated(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check("an atomic operation", pointers, mask)
        return update(self, operation, pointers, value, mask, *rest)

    executor.__call__ = launched
    builder.create_masked_load, builder.create_masked_store = loaded, stored
    builder.create_atomic_rmw = updated
    try:
        yield
    finally:
        executor.__call__ = launch
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw = update
