"""Has an engine's kernels compiled by other processes while its weights are loaded.

A machine's first start of a model needs 25 to 50 kernels, each of which takes Triton seconds of one core.
Without this the first step would compile them one after the other, with all others idle. On a machine that
has done it before nothing is begun. Whatever goes wrong costs a start nothing but the time: what is missing
is compiled when it is launched.
"""

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from headway_runtime.config import EngineConfig
from headway_runtime.cpus import usable_cpus
from headway_runtime.layers.kernel_choice import uses_triton
from headway_runtime.parallel.ranks import Ranks
from headway_runtime.parallel.share import Share
from headway_runtime.start_timeline import StartTimeline

if TYPE_CHECKING:
    from headway_runtime.compiling.order import CompileOrder

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "headway_runtime.compiling.worker")
# There are hardly more kernels than this, and each process takes some 300 MB.
MOST_PROCESSES = 16
# How long a start waits for it, at most: many times what it takes with one core.
WAIT_SECONDS = 180.0


class KernelsAhead:
    """Kernels that are being compiled. OSError where no process can be had."""

    def __init__(self, order: "CompileOrder") -> None:
        # Without a GPU to see, and with one thread each: the processes are as many as there are cores.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        # It may end before it has read all of it, which its status tells.
        self._order = pickle.dumps(order)
        self._send()

    def _send(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._order)
            self._process.stdin.close()
        except BrokenPipeError:
            logger.debug("the process that compiles kernels has ended")
        self._process.stdin = None  # `communicate` is not to write there

    def wait(self, timeline: StartTimeline, seconds: float = WAIT_SECONDS) -> None:
        """Until all is compiled, or so many seconds have passed; the timeline is told."""
        try:
            out, said = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._missing(f"not done after {seconds:g} s")
            self.close()
        else:
            self._ended(out, said)
        timeline.ended("compile")

    def _ended(self, out: bytes, said: bytes) -> None:
        if self._process.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()
            self._missing(lines[-1] if lines else f"status {self._process.returncode}")
            return
        found = json.loads(out)
        for name, problem in found["failed"].items():
            self._missing(f"{name}: {problem}")
        logger.info("%d kernels are compiled", found["num_kernels"] - len(found["failed"]))

    def _missing(self, why: str) -> None:
        logger.warning("kernels are compiled when they are first launched, as they are not yet: %s", why)

    def close(self) -> None:
        """End it, if it lives."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def kernels_ahead(config: EngineConfig, device: torch.device, ranks: Ranks) -> Iterator[KernelsAhead | None]:
    """Begin to compile what this rank launches; None where there is nothing to compile, or others of the same
    machine do it."""
    begun = None
    if device.type == "cuda" and uses_triton(device) and ranks.local_rank == 0:
        begun = _begin(config, device, Share(ranks.rank, ranks.size))
    try:
        yield begun
    finally:
        if begun is not None:
            begun.close()


def _begin(config: EngineConfig, device: torch.device, share: Share) -> KernelsAhead | None:
    from headway_runtime.compiling.order import CompileOrder
    from headway_runtime.kernels.triton.launch import gpu_of

    # This process loads weights meanwhile.
    num_processes = max(1, min(MOST_PROCESSES, usable_cpus() - 1))
    order = CompileOrder(config, gpu_of(device), share, num_processes, os.getpid())
    try:
        return None if order.is_done else KernelsAhead(order)
    except OSError as error:
        logger.warning("no kernels are compiled ahead: %s", error)
        return None
