"""What ranks do with tensors together: add them up, bring them to the first rank, get what it has.

Counts what that takes.

Owns torch.distributed's process group (gloo between CPUs, NCCL between GPUs), made for one engine alone: it
is never the process' default group, so that several engines, and the user's own groups, may live beside it.
"""

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from headway_runtime.parallel.one_shot import (
    SmallSums,
    SymmetricSum,
    can_share_memory,
    most_bytes_for,
    open_small_sums,
)
from headway_runtime.parallel.share import WHOLE, Share
from headway_runtime.parallel.traffic import Traffic

# By which NCCL's limit is later than `RankWatch`'s, which tells everybody why: NCCL's ends the process, a
# user's too, with what its own thread throws.
NCCL_MARGIN = timedelta(seconds=60)


class Collectives(Protocol):
    """What we need of a process group. The result of each is waited for."""

    def allreduce(self, tensors: list[Tensor]) -> Any: ...
    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> Any: ...
    def gather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: GatherOptions) -> Any: ...
    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> Any: ...
    def abort(self) -> None: ...


class TensorGroup:
    """All ranks call the same methods in the same order, with tensors of the same shape."""

    def __init__(
        self, share: Share, processes: Collectives | None, small_sums: SmallSums | None = None
    ) -> None:
        """processes: None for a rank that is alone. small_sums: what adds up tensors that it takes."""
        assert (processes is None) == (share.size == 1)
        self.share = share
        self._processes = processes
        self._small_sums = small_sums
        self.traffic = Traffic(share.size)

    @property
    def size(self) -> int:
        return self.share.size

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, maybe in place; the same to the last bit on each."""
        if self._processes is None:
            return x
        began_at = time.monotonic()
        if self._small_sums is not None and self._small_sums.takes(x):
            total = self._small_sums(x)
            self._count(x, began_at)
            return total
        self._processes.allreduce([x]).wait()
        self._count(x, began_at)
        return x

    def side_by_side(self, x: Tensor, num_columns: int) -> Tensor:
        """Columns of all ranks, [rows, columns] each, on the first rank, less those past `num_columns`.

        On others `x` itself.
        """
        processes = self._processes
        if processes is None:
            return x
        began_at = time.monotonic()
        x = x.contiguous()
        is_first = self.share.rank == 0
        if x.is_cuda:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            processes.allgather([parts], [x]).wait()
        else:
            parts = [torch.empty_like(x) for _ in range(self.size)] if is_first else []
            options = GatherOptions()
            options.rootRank = 0
            processes.gather([parts] if is_first else [], [x], options).wait()
        self._count(x, began_at)
        if not is_first:
            return x
        width = x.shape[1]
        own = [part[:, : max(0, num_columns - index * width)] for index, part in enumerate(parts)]
        return torch.cat(own, dim=1)

    def from_first(self, x: Tensor) -> Tensor:
        """What the first rank has, in place, on all of them."""
        if self._processes is None:
            return x
        began_at = time.monotonic()
        options = BroadcastOptions()
        options.rootRank = 0
        self._processes.broadcast([x], options).wait()
        self._count(x, began_at)
        return x

    def abort(self) -> None:
        """Let whoever waits for others on a device go on, with an error."""
        if self._processes is not None:
            self._processes.abort()

    def _count(self, x: Tensor, began_at: float) -> None:
        traffic = self.traffic
        traffic.num_exchanges += 1
        traffic.num_bytes += x.nbytes
        if not x.is_cuda:
            traffic.seconds += time.monotonic() - began_at


ALONE = TensorGroup(WHOLE, None)


def open_group(
    share: Share, store: Store, device: torch.device, host: str, timeout_seconds: float
) -> TensorGroup:
    """Connects with all other ranks; they meet at the store. host: this process' address for them."""
    timeout = timedelta(seconds=timeout_seconds)
    own = PrefixStore("headway", store)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds for CUDA have it

        nccl: Any = ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout + NCCL_MARGIN
        processes: Collectives = nccl(own, share.rank, share.size, options)
        return TensorGroup(share, processes, _small_sums(processes, share, store, device))
    return TensorGroup(share, _gloo(own, share, host, timeout))


def _small_sums(processes: Collectives, share: Share, store: Store, device: torch.device) -> SmallSums | None:
    most_bytes = most_bytes_for(share, device)

    def all_agree(own: bool) -> bool:  # noqa: FBT001 - a word of this rank
        said = torch.tensor([float(own)], device=device)
        processes.allreduce([said]).wait()
        return int(said.item()) == share.size

    return open_small_sums(
        most_bytes,
        lambda: can_share_memory(share, device),
        lambda: SymmetricSum(share, PrefixStore("headway-sums", store), most_bytes, device),
        all_agree,
    )


def _gloo(store: Store, share: Share, host: str, timeout: timedelta) -> Collectives:
    gloo: Any = ProcessGroupGloo  # of its options, PyTorch's stubs know nothing
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1
    backend: Collectives = gloo(store, share.rank, share.size, options)
    return backend
