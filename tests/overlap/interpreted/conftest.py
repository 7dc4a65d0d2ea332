"""A device that is not there: memory that only looks like a GPU's, and that notices whoever waits for it.

All computing is done at once, on the CPU, but the host gets to know nothing of it before it has waited for a
moment: until then memory that a copy to the host was begun into holds nonsense. Memory that a copy to the
device was begun from must be left alone until that moment. Whoever looks into the device's memory in any
other way while a step is being made raises HiddenWait: on a GPU the host would stand still there.

Triton must interpret, which is decided when it is imported: `test_interpreted.py` runs these tests.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from benchmarks.gpu.fast_interpreter import hasten
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway_runtime import transfers
from headway_runtime.layers import kernel_choice

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    hasten()

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]

# What a copy that was begun has not brought yet.
NONSENSE = 77
# Operators whose results' shapes, or whose results, the host must know.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
}
# What may be done with the host's memory without looking into the device's.
OF_VIEWS = {"aten::view", "aten::slice", "aten::select", "aten::detach", "aten::alias", "aten::as_strided"}
LOOKING = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")


class HiddenWait(AssertionError):  # noqa: N818 - it is no error of the code that tests import
    """The host would wait for the device here."""


class FakeDevice:
    """num_waits: for moments, since it was set to 0."""

    def __init__(self) -> None:
        self.num_waits = 0
        self.is_watching = False
        # All memory that is the host's, kept so that no address is used twice.
        self._host: dict[int, Tensor] = {}
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._brought: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A step is being made."""
        self.is_watching = True
        try:
            with _Watch(self):
                yield
        finally:
            self.is_watching = False

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        was_watching, self.is_watching = self.is_watching, False
        try:
            yield
        finally:
            self.is_watching = was_watching

    def is_hosts(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._host

    def as_hosts(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self._host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    # What stands for the functions of `transfers`.

    def host_memory(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self.looking_away():
            return self.as_hosts(torch.full((size,), NONSENSE, dtype=dtype))

    def fill(self, on_device: Tensor, host: Tensor) -> None:
        assert self.is_hosts(host), "the device cannot read this without a wait"
        with self.looking_away():
            on_device.copy_(host)
            self._sent.append((host, host.clone()))

    def sent(self, host: Tensor, device: torch.device) -> Tensor:
        assert self.is_hosts(host), "the device cannot read this without a wait"
        with self.looking_away():
            self._sent.append((host, host.clone()))
            return host.clone()

    def brought(self, found: Tensor) -> Tensor:
        with self.looking_away():
            host = self.as_hosts(torch.full_like(found, NONSENSE))
            self._brought.append((host, found.clone()))
            return host

    def take_copies(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        taken = (self._sent, self._brought)
        self._sent, self._brought = [], []
        return taken


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.is_watching:
            self._judge(func.name(), [one for one in args if isinstance(one, Tensor)], args)
        return func(*args, **(kwargs or {}))

    def _judge(self, name: str, tensors: list[Tensor], args: Any) -> None:
        base = name.split(".")[0]
        if name in WAITING or base in WAITING:
            raise HiddenWait(f"{name} makes the host wait")
        if base in ("aten::index", "aten::index_put", "aten::index_put_"):
            indices = [one for one in args[1] if one is not None]
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                raise HiddenWait(f"{name} by a mask makes the host wait")
            tensors = [*tensors, *indices]
        if base not in OF_VIEWS and any(one.numel() and self._device.is_hosts(one) for one in tensors):
            raise HiddenWait(f"{name} reads or writes the host's memory")


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()

    class Moment:
        def __init__(self, of: torch.device) -> None:
            self._sent, self._brought = device.take_copies()

        def wait(self) -> None:
            device.num_waits += 1
            with device.looking_away():
                for host, then in self._sent:
                    assert torch.equal(host, then), "the host wrote where a step that is under way reads"
                for host, value in self._brought:
                    host.copy_(value)

    for name in ("host_memory", "fill", "sent", "brought"):
        monkeypatch.setattr(transfers, name, getattr(device, name))
    monkeypatch.setattr(transfers, "shares_memory", lambda of: False)
    monkeypatch.setattr(transfers, "Moment", Moment)
    _forbid_looking(device, monkeypatch)
    monkeypatch.setenv(kernel_choice.VARIABLE, "triton")
    kernel_choice.forget_choice()
    return device


def _forbid_looking(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """No method of a tensor, and no way to make one of the host's values, but for the host's own memory."""

    def guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: Tensor, *arguments: Any, **named: Any) -> Any:
            if device.is_watching and not device.is_hosts(self):
                raise HiddenWait(f"Tensor.{name} makes the host wait")
            with device.looking_away():
                return original(self, *arguments, **named)

        return look

    for name in LOOKING:
        monkeypatch.setattr(Tensor, name, guarded(name, getattr(Tensor, name)))
    make_tensor, from_numpy = torch.tensor, torch.from_numpy

    def made(*arguments: Any, **named: Any) -> Tensor:
        if device.is_watching:
            raise HiddenWait("torch.tensor makes the host wait until its values are on the device")
        return make_tensor(*arguments, **named)

    def taken(values: Any) -> Tensor:
        found = from_numpy(numpy.array(values))
        return device.as_hosts(found) if device.is_watching else found

    def synchronized(*arguments: Any) -> None:
        raise HiddenWait("the host waits for all that the device does")

    monkeypatch.setattr(torch, "tensor", made)
    monkeypatch.setattr(torch, "as_tensor", made)
    monkeypatch.setattr(torch, "from_numpy", taken)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized)
    # A kernel's launch waits for nothing; what the interpreter does there is no part of it.
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        with device.looking_away():
            return launch(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
