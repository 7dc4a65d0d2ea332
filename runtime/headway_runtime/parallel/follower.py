"""A rank above 0 as it sees the others: its connections with rank 0, and its part in tensors."""

import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from headway_runtime.config import EngineConfig
from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.parallel import wire
from headway_runtime.parallel.messages import Accepted, Agreed, Call, Report
from headway_runtime.parallel.ranks import serves_call, told_error
from headway_runtime.parallel.share import Share
from headway_runtime.parallel.spawn import RankLaunch
from headway_runtime.parallel.tensor_group import TensorGroup, open_group

logger = logging.getLogger(__name__)


class Follower:
    """config: rank 0's, with what is this node's own."""

    is_usable = True

    def __init__(self, launch: RankLaunch, calls: socket.socket, accepted: Accepted) -> None:
        assert accepted.config is not None
        config = replace(accepted.config, num_threads=launch.num_threads)
        self.config: EngineConfig = (
            config if launch.model_path is None else replace(config, model_path=launch.model_path)
        )
        self.rank, self.size = launch.rank, config.parallel.size
        self.num_local, self.local_rank = config.parallel.ranks_per_node, launch.local_rank
        self._calls = calls
        self._accepted = accepted

    def open(self, device: torch.device) -> TensorGroup:
        host, _ = self._calls.getpeername()[:2]
        seconds = self.config.parallel.timeout_seconds
        store = TCPStore(
            self._accepted.host or host,
            self._accepted.store_port,
            self.size,
            is_master=False,
            timeout=timedelta(seconds=min(60.0, seconds)),
            wait_for_workers=False,
        )
        own_host = self._accepted.host or self._calls.getsockname()[0]
        return open_group(Share(self.rank, self.size), store, device, own_host, seconds)

    def agree(self, value: int) -> int:
        wire.send(self._calls, Report(value))
        answer = wire.receive(self._calls)
        assert isinstance(answer, Agreed), answer
        return answer.value

    def ready(self) -> None:
        self.agree(0)

    def call(self, call: Call, work: Callable[[], Any]) -> Any:
        raise AssertionError("only rank 0 tells others what to do")

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()  # how long is rank 0's to mind, which waits as well

    def close(self) -> None:
        """Nothing: rank 0 ends this process."""

    def serve(self, runner: object) -> None:
        """Do what rank 0 calls, until it is gone. What a call raises that nobody waits for passes through."""
        while True:
            call = wire.receive(self._calls)
            assert isinstance(call, Call), call
            method = serves_call(runner, call)
            if not call.is_confirmed:
                method(*call.arguments)
                continue
            error: str | None = None
            alike = None
            try:
                result = method(*call.arguments)
                alike = getattr(result, call.alike) if call.alike else None
            except HeadwayRuntimeError as failure:
                logger.warning("%s failed here: %s", call.method, failure)
                error = told_error(failure)
            except Exception as failure:
                # Whatever it is: rank 0 waits for the word, and goes on without what failed.
                logger.exception("%s failed here", call.method)
                error = told_error(failure)
            wire.send(self._calls, Report(error=error, alike=alike))
