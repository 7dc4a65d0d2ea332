"""Adding up small tensors of GPUs of one machine in one kernel: each rank reads all others' memory itself.

NCCL's ring or tree takes several hops, which for the few kilobytes of a decode step are all of its time. Here
every rank copies its tensor into memory that the others can read, waits for them at a barrier in the kernel,
and adds up what all have: one hop, and (ranks - 1) times the bytes, so that larger tensors are NCCL's. The
kernel is PyTorch's, over its symmetric memory. All ranks add in the same order, where there are 2, 4 or 8.

That barrier has no limit, and nobody can let go who waits at it: newer versions of PyTorch keep its flags to
themselves, and `TensorGroup.abort` ends what NCCL does alone. So the limit is the host's (`RankWatch`): where
a rank is lost, or a step takes longer than one exchange may, all requests end with the reason at once, and
then the engine; its GPU waits on until the process ends, which a server's does. A kernel of our own that gave
up after a time would need a flag for the host to look at in each step, and a barrier that is not proven.

Whatever is missing (the operator, direct access between GPUs, a rank on another machine, a size without an
entry in the table of configurations) leaves all to NCCL, on all ranks alike.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from headway_runtime.parallel.share import Share

logger = logging.getLogger(__name__)

KERNEL = "one_shot_all_reduce"
# Of what the kernel adds, and of bytes that each thread of it loads at once.
DTYPES = (torch.bfloat16, torch.float32)
ALIGNED_BYTES = 16
# Sizes of groups for which the kernel adds in the order of ranks.
SIZES = (2, 4, 8)

AddUp = Callable[[Tensor], Tensor]


class SharedSum(Protocol):
    """Adds up over all ranks what is no larger than its memory; `SymmetricSum` is one."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous; not changed."""


class SymmetricSum:
    """Over PyTorch's symmetric memory. RuntimeError where the GPUs cannot reach each other's."""

    def __init__(self, share: Share, store: Any, most_bytes: int, device: torch.device) -> None:
        """store: where ranks tell each other the handles of their memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        # Groups of several engines of a process have names of their own.
        self._name = f"headway-{id(self):x}" if share.rank == 0 else ""
        self._name = _told_by_the_first(store, self._name)
        _SymmetricMemory.set_group_info(self._name, share.rank, share.size, store)
        self._buffers: dict[torch.dtype, Tensor] = {}
        for dtype in DTYPES:
            count = most_bytes // dtype.itemsize
            buffer = _SymmetricMemory.empty_strided_p2p((count,), (1,), dtype, device, self._name)
            _SymmetricMemory.rendezvous(buffer)
            self._buffers[dtype] = buffer
        self._add = torch.ops.symm_mem.one_shot_all_reduce_copy

    def __call__(self, x: Tensor) -> Tensor:
        total: Tensor = self._add(self._buffers[x.dtype][: x.numel()], x.view(-1), "sum", self._name)
        return total.view(x.shape)


def _told_by_the_first(store: Any, name: str) -> str:
    """A store of their own serves one such question."""
    if name:
        store.set("name", name)
    return str(store.get("name").decode())


class SmallSums:
    """Which tensors are added up so: those of at most `most_bytes`."""

    def __init__(self, add_up: SharedSum, most_bytes: int) -> None:
        self._add_up, self._most_bytes = add_up, most_bytes

    def takes(self, x: Tensor) -> bool:
        return (
            0 < x.nbytes <= self._most_bytes
            and x.nbytes % ALIGNED_BYTES == 0
            and x.dtype in DTYPES
            and x.is_contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Of a tensor that it takes, on all ranks; a new one, the same to the last bit on each."""
        return self._add_up(x)


def most_bytes_for(share: Share, device: torch.device) -> int:
    """As the table of configurations has it; 0 where NCCL is to do all."""
    if share.size not in SIZES or device.type != "cuda":
        return 0
    try:
        from headway_runtime.kernels.triton.launch import configuration, gpu_of
    except ImportError:
        return 0  # without Triton
    return configuration(KERNEL, str(share.size), gpu_of(device)).get("most_bytes", 0)


def can_share_memory(share: Share, device: torch.device) -> bool:
    """Whether this rank's GPU can read those of all others, which are its neighbours on this machine."""
    if torch.cuda.device_count() < share.size:
        return False
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return False
    own = device.index or 0
    return all(other == own or torch.cuda.can_device_access_peer(own, other) for other in range(share.size))


def open_small_sums(
    most_bytes: int,
    can_share: Callable[[], bool],
    make: Callable[[], SharedSum],
    all_agree: Callable[[bool], bool],
) -> SmallSums | None:
    """On all ranks, or on none. all_agree: whether all ranks said yes; every rank asks it."""
    if most_bytes <= 0:
        return None  # which is the same on all: it hangs on their number, and their kind of GPU
    if not all_agree(can_share()):
        logger.info("small tensors are added up by NCCL: not all GPUs can read each other's memory")
        return None
    made: SharedSum | None = None
    try:
        made = make()
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.warning("small tensors are added up by NCCL: %s", error)
    if not all_agree(made is not None) or made is None:
        return None
    logger.info("tensors of up to %d bytes are added up in one kernel", most_bytes)
    return SmallSums(made, most_bytes)
