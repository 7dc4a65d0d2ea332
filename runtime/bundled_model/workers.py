"""Training on several processes: each makes its own rows, and all step with the mean gradient.

On a busy machine two processes of one thread lose far less time than one process of two threads:
they wait for each other once a step instead of at every operation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as distributed
from torch import nn
from torch.multiprocessing.spawn import spawn

Options = TypeVar("Options")
STEP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Worker:
    """One of `count` training processes."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def average_gradients(self, network: nn.Module) -> None:
        """Replace each gradient by its mean over all workers."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.count
        first = 0
        for gradient in gradients:
            gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
            first += gradient.numel()


def run_workers(count: int, run: Callable[[Worker, Options], None], options: Options) -> None:
    """Call `run(worker, options)` in this process, or in `count` processes of one group."""
    if count == 1:
        run(Worker(), options)
        return
    with tempfile.TemporaryDirectory() as directory:
        arguments = (count, Path(directory) / "group", run, options)
        spawn(_join_and_run, arguments, nprocs=count)  # type: ignore[no-untyped-call]


def _join_and_run(
    rank: int, count: int, group_file: Path, run: Callable[[Worker, Options], None], options: Options
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=group_file.as_uri(), rank=rank, world_size=count, timeout=STEP_TIMEOUT
    )
    try:
        run(Worker(rank, count), options)
    finally:
        distributed.destroy_process_group()
