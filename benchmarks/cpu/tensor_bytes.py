"""What the tensors of an object and of all that it holds take in memory, each storage once."""

from collections.abc import Iterator
from typing import Any

import torch


def tensor_bytes(root: object) -> int:
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.is_mkldnn:
                # Packed for oneDNN, it has no storage to be asked; its numbers are as many, but for padding.
                found[id(one)] = one.numel() * one.element_size()
            else:
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            continue
        left.extend(_parts(one))
    return sum(found.values())


def _parts(one: object) -> Iterator[Any]:
    if isinstance(one, dict):
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    elif type(one).__module__.startswith("headway_runtime"):
        yield from vars(one).values() if hasattr(one, "__dict__") else ()
        for kind in type(one).__mro__:
            names = getattr(kind, "__slots__", ())
            for name in [names] if isinstance(names, str) else names:
                if hasattr(one, name):
                    yield getattr(one, name)
