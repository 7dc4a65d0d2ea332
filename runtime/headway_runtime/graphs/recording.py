"""Records work without a device that can: every operator and every interpreted kernel, in order.

A recording keeps what a CUDA graph keeps: which kernels run, in which order, on which addresses. What the
host computed while it was made is a constant of it, and memory that the work took holds anything when it is
replayed, until the work writes it. So tests that compare replayed with plain steps find what would go wrong
on a GPU; and launches of a decode step can be counted on any machine.

Work that a stream under capture refuses is refused: waits for the device, and copies of the host's numbers.
Streams and the sharing of memory between recordings are CUDA's alone.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from headway_runtime.graphs.graph_memory import UsedBytes
from headway_runtime.parallel.tensor_group import Collectives

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten
# Memory is taken, and nothing is launched.
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
# The host waits for what they return, or for a copy of what it has.
WAITING = {
    aten._local_scalar_dense,
    aten.item,
    aten.nonzero,
    aten.masked_select,
    aten.lift_fresh,
    aten.equal,
    aten._unique2,
    aten.bincount,
}


@dataclass(slots=True)
class Launch:
    """name: of a kernel, or of PyTorch's operator."""

    name: str
    is_kernel: bool


@dataclass(slots=True)
class RecordedWork:
    """launches: those that a device would see. num_replays: so far."""

    launches: list[Launch] = field(default_factory=list)
    num_replays: int = 0
    num_bytes: int = 0
    _steps: list[Callable[[], None]] = field(default_factory=list)

    def replay(self) -> None:
        self.num_replays += 1
        for step in self._steps:
            step()

    def add_kernel(self, name: str, run: Callable[[], None]) -> None:
        self.launches.append(Launch(name, is_kernel=True))
        self._steps.append(run)

    def add_operator(
        self, operator: Any, args: Sequence[object], kwargs: dict[str, object], out: object
    ) -> None:
        results = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        known = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        own = [one for one in results if one.untyped_storage().data_ptr() not in known]
        self.num_bytes += sum(one.untyped_storage().nbytes() for one in own)
        if operator.overloadpacket in ALLOCATIONS:
            self._steps.extend(partial(_spoil, one) for one in own)
        elif operator._schema.is_mutable:
            self.launches.append(Launch(str(operator), is_kernel=False))
            self._steps.append(lambda: operator(*args, **kwargs))
        elif own:
            self.launches.append(Launch(str(operator), is_kernel=False))
            self._steps.append(lambda: _into(results, operator(*args, **kwargs)))
        # Else it is a view of what is there.


def _tensors(values: object) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _into(kept: list[Tensor], out: object) -> None:
    for target, one in zip(kept, _tensors(out), strict=True):
        target.copy_(one)


def _spoil(memory: Tensor) -> None:
    """Memory holds anything when it is taken anew."""
    if memory.dtype.is_floating_point and memory.dtype.itemsize > 1:
        memory.fill_(float("nan"))
    elif memory.dtype.itemsize == 1:
        memory.view(torch.uint8).fill_(0xFF)
    else:
        memory.fill_(-1)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, work: RecordedWork) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.overloadpacket in WAITING:
            raise RuntimeError(f"{func} cannot be captured: the host waits for the device")
        out = func(*args, **kwargs)
        if func.overloadpacket in ALLOCATIONS:
            # No kernel writes it until it is replayed, and operators read it now, as indices, too.
            for one in _tensors(out):
                one.zero_()
        self._work.add_operator(func, args, kwargs, out)
        return out


@contextmanager
def _kernels_recorded(work: RecordedWork) -> "Iterator[None]":
    """Launches of interpreted kernels, which are no operators of PyTorch. None runs, as under a stream's
    capture none does."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(executor: Any, *args: object, **kwargs: object) -> None:
        def run() -> None:
            with _disable_current_modes():
                launch(executor, *args, **kwargs)

        work.add_kernel(executor.fn.__name__, run)

    GridExecutor.__call__ = recorded
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


class Recorder:
    """A `capture.Capturer` for tensors on a CPU. works: what it has recorded, the latest last."""

    def __init__(self) -> None:
        self.works: list[RecordedWork] = []
        self._current: RecordedWork | None = None

    def exchanged(self, name: str, run: Callable[[], None]) -> None:
        """Ranks exchange tensors: now, and in each replay of what is being recorded, if anything is."""
        if self._current is not None:
            self._current.add_kernel(name, run)
        # What gloo does with tensors for it is a part of it.
        with _disable_current_modes():
            run()

    def warm(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> RecordedWork:
        recorded = self._current = RecordedWork()
        try:
            with _kernels_recorded(recorded), _Recording(recorded):
                work()
        finally:
            self._current = None
        self.works.append(recorded)
        return recorded

    def give_back(self) -> None:
        """Nobody keeps any."""

    def used_bytes(self) -> UsedBytes:
        return UsedBytes(sum(work.num_bytes for work in self.works))


class RecordedCollectives:
    """A process group of CPUs whose exchanges are recorded, as NCCL's are by a graph.

    Ranks replay in lockstep, so each meets the others in its replay as it did when it was recorded.
    """

    def __init__(self, processes: Collectives, recorder: Recorder) -> None:
        self._processes, self._recorder = processes, recorder

    def allreduce(self, tensors: list[Tensor]) -> "_Done":
        return self._do("allreduce", tensors)

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> "_Done":
        return self._do("allgather", parts, tensors)

    def gather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: GatherOptions) -> "_Done":
        return self._do("gather", parts, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> "_Done":
        return self._do("broadcast", tensors, options)

    def abort(self) -> None:
        self._processes.abort()

    def _do(self, name: str, *arguments: object) -> "_Done":
        exchange = getattr(self._processes, name)
        self._recorder.exchanged(name, lambda: exchange(*arguments).wait())
        return _Done()


class _Done:
    """What an exchange returns: there is nothing left to wait for."""

    def wait(self) -> None: ...
