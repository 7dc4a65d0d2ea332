"""Recording of device work that is then launched as one: what is asked of it, and CUDA's.

All recordings share one pool of memory: they never run at the same time, and what they leave lies outside of
it. So the largest one, recorded first, makes the memory, and the others find theirs in it.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from headway_runtime.graphs.graph_memory import UsedBytes


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch it, behind what the current stream has been given."""


class Capturer(Protocol):
    """What records."""

    def warm(self, work: Callable[[], None]) -> None:
        """Do the work once as it is: kernels, handles and workspaces, made at first use, are then there."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches, without running it. RuntimeError for work that cannot be recorded."""

    def give_back(self) -> None:
        """Memory that nobody uses, to the device."""

    def used_bytes(self) -> UsedBytes:
        """Of the device's memory; what recording takes shows in it."""


class CudaCapturer:
    """Records on a stream of its own: the default one cannot be recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], None]) -> None:
        # On the current stream: what PyTorch keeps of its memory is then of use to other steps.
        work()
        torch.cuda.synchronize(self._device)

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _no_garbage_collected():
            # Other threads of the process may allocate or wait meanwhile; they do not spoil it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                # Ends the recording, whatever it is worth: the stream cannot be used before.
                _end_quietly(graph)
                raise
            graph.capture_end()
        torch.cuda.synchronize(self._device)
        return graph

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def used_bytes(self) -> UsedBytes:
        free, total = torch.cuda.mem_get_info(self._device)
        pool = int(torch.cuda.memory_reserved(self._device))
        return UsedBytes(pool, int(total - free) - pool)


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """What is found to be garbage may be something of CUDA's, whose end would be recorded, or refused."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    with contextlib.suppress(RuntimeError):  # the error that ended the work says why
        graph.capture_end()
