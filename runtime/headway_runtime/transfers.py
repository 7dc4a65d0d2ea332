"""What crosses between the host and a device while the host goes on.

A copy to a device is read from pinned memory some time later: until the step has passed, nobody may write
there. A copy to the host is there once a `Moment` that was taken after it has passed. Waiting for a moment is
the only way to wait. On a CPU host and device share their memory, and every moment has passed.

These functions are called by the name of this module, so that there is one place where a test can put a
device in between that notices what a real one would wait for.
"""

from collections.abc import Iterable

import numpy
import torch
from torch import Tensor


def shares_memory(device: torch.device) -> bool:
    """Whether the host and the device need no copies of what the other has."""
    return device.type == "cpu"


def host_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, of unknown contents, from which the device can be filled without a wait."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def fill(on_device: Tensor, host: Tensor) -> None:
    """Have `on_device` get what is in `host`, which came from `host_memory`."""
    on_device.copy_(host, non_blocking=True)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """On the device, what is in `host`, which came from `host_memory`."""
    return host if shares_memory(device) else host.to(device, non_blocking=True)


def sent_integers(values: Iterable[int], device: torch.device) -> Tensor:
    """The same of numbers: int64."""
    numbers = numpy.fromiter(values, dtype=numpy.int64)
    host = host_memory(numbers.size, torch.int64, device)
    host.numpy()[:] = numbers
    return sent(host, device)


def brought(found: Tensor) -> Tensor:
    """On the host, what is in `found`, once a moment from now on has passed."""
    if shares_memory(found.device) or found.is_meta:
        return found  # of a tensor that holds nothing, there is nothing to bring
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    return host


class Moment:
    """This point in the device's work."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the device has done all that it was given before."""
        if self._event is not None:
            self._event.synchronize()
