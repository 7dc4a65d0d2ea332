"""Rank 0's side: waits for the other ranks, tells them what to compute, and knows when they are lost.

    listen -> start this node's ranks -> all ranks and nodes say hello -> accepted, with the configuration
    -> tensors connected -> all have loaded -> calls, in order, until the end

`RankWatch` minds whether they live. Owns no tensors and no model.
"""

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from headway_runtime.config import EngineConfig
from headway_runtime.errors import (
    ConfigError,
    DoesNotFitError,
    HeadwayRuntimeError,
    OtherResultError,
    RankDiedError,
)
from headway_runtime.parallel import wire
from headway_runtime.parallel.messages import (
    Accepted,
    Agreed,
    Call,
    Report,
)
from headway_runtime.parallel.share import Share
from headway_runtime.parallel.started import StartedRanks
from headway_runtime.parallel.tensor_group import ALONE, TensorGroup, open_group
from headway_runtime.parallel.watch import MOST_SILENT_TICKS, TICK_SECONDS

# After an error that a lost rank may have caused, until it is known to be lost.
VERDICT_SECONDS = (MOST_SILENT_TICKS + 2) * TICK_SECONDS


class Leader:
    """The ranks as the first of them sees them. One thread calls everything but `close`."""

    rank, local_rank = 0, 0

    def __init__(self, started: StartedRanks, config: EngineConfig) -> None:
        """Waits until all have come. RankDiedError if one of them ends, or does not come in time."""
        self._parallel = config.parallel
        self._started = started
        self._watch = started.watch
        self._calls: dict[int, socket.socket] = {}
        self._address = started.address
        self._group = ALONE
        self._is_calling = False
        self._is_out_of_step = False
        self._waits_on_device = False
        self._host = "127.0.0.1"
        try:
            started.gathering.wait()
            if self._watch.failure is not None:
                raise self._death()
            self._calls, self._host = dict(started.gathering.calls), started.gathering.host
            self._accept_all(config)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return self._parallel.size

    @property
    def num_local(self) -> int:
        return self._parallel.ranks_per_node

    @property
    def is_usable(self) -> bool:
        return not self._is_out_of_step and self._watch.failure is None

    def open(self, device: torch.device) -> TensorGroup:
        share = Share(0, self.size)
        try:
            self._group = open_group(share, self._store, device, self._host, self._parallel.timeout_seconds)
        except RuntimeError as error:
            raise self._verdict(error) from error
        self._watch.let_go = self._group.abort
        # On a CPU each exchange has its own limit.
        self._waits_on_device = device.type == "cuda"
        if self._watch.failure is not None:
            self._group.abort()  # it was lost before that was known
        return self._group

    def agree(self, value: int) -> int:
        what = "did not agree" if self._is_calling else "did not load its share of the model"
        reports = self._reports(what)
        least = min(value, *(report.value for report in reports.values()))
        self._tell(Agreed(least))
        return least

    def ready(self) -> None:
        self.agree(0)
        self._watch.is_ready = True

    def call(self, call: Call, work: Callable[[], Any]) -> Any:
        if self._is_calling:
            return work()  # a part of what the others are told to do already
        self._tell(call)
        self._is_calling = True
        error: Exception | None = None
        result = None
        try:
            with self.waiting():
                result = work()
        except Exception as one:
            if not call.is_confirmed or self._watch.failure is not None:
                # What the others have done of it is unknown.
                self._is_out_of_step = True
                raise self._verdict(one, seconds=0.0 if not isinstance(one, RuntimeError) else None) from one
            error = one
        finally:
            self._is_calling = False
        if call.is_confirmed:
            alike = getattr(result, call.alike) if call.alike and error is None else None
            self._raise_failures(self._reports(f"did not answer {call.method!r}"), error, alike)
        return result

    def waiting(self) -> AbstractContextManager[None]:
        return self._watch.waiting() if self._waits_on_device else nullcontext()

    def close(self) -> None:
        self._started.close()
        self._calls.clear()

    # Parts of these.

    def _accept_all(self, config: EngineConfig) -> None:
        """Send everybody the configuration, and where tensors meet."""
        meeting = socket.create_server((self._address, 0))
        port = meeting.getsockname()[1]
        timeout = timedelta(seconds=min(60.0, self._parallel.timeout_seconds))
        self._store = TCPStore(
            self._host,
            port,
            self.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=meeting.detach(),
        )
        for rank, connection in self._calls.items():
            own = replace(config, parallel=replace(config.parallel, node_rank=self._parallel.node_of(rank)))
            host = self._host if self._parallel.node_of(rank) == 0 else ""
            self._send(connection, wire.encode(Accepted(port, host, own)))
            connection.settimeout(self._parallel.timeout_seconds)

    def _tell(self, message: object) -> None:
        frame = wire.encode(message)
        for connection in self._calls.values():
            self._send(connection, frame)

    def _send(self, connection: socket.socket, frame: bytes) -> None:
        try:
            connection.sendall(frame)
        except OSError as error:
            self._is_out_of_step = True
            raise self._verdict(error) from error

    def _reports(self, what: str) -> dict[int, Report]:
        """One from each rank. what: the complaint about one that says nothing."""
        found: dict[int, Report] = {}
        deadline = time.monotonic() + self._parallel.timeout_seconds
        for rank, connection in self._calls.items():
            try:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                message = wire.receive(connection)
                connection.settimeout(self._parallel.timeout_seconds)
            except TimeoutError as error:
                self._is_out_of_step = True
                node, seconds = self._parallel.node_of(rank), self._parallel.timeout_seconds
                raise RankDiedError(
                    f"rank {rank} on node {node} {what} within {seconds:g} s; see its log, or raise "
                    "--distributed-timeout-seconds"
                ) from error
            except (OSError, EOFError, wire.BadMessageError) as error:
                self._is_out_of_step = True
                raise self._verdict(error) from error
            assert isinstance(message, Report), message
            found[rank] = message
        return found

    def _raise_failures(self, reports: Mapping[int, Report], own: Exception | None, alike: object) -> None:
        """Rank 0's own error speaks first, as its caller knows it. alike: rank 0's, which all must have."""
        if own is not None:
            raise own
        for rank, report in reports.items():
            if report.error is not None:
                node = self._parallel.node_of(rank)
                raise HeadwayRuntimeError(f"rank {rank} on node {node}: {report.error}")
        for rank, report in reports.items():
            if report.alike != alike:
                raise OtherResultError(f"rank {rank} on node {self._parallel.node_of(rank)}")

    def _verdict(self, error: Exception, seconds: float | None = None) -> Exception:
        """What to raise for an error: that a rank is lost, if one is, which takes a moment to be known."""
        if self._watch.has_failed.wait(VERDICT_SECONDS if seconds is None else seconds):
            return self._death()
        return error

    def _death(self) -> HeadwayRuntimeError:
        message = self._watch.failure or "a rank is lost"
        if self._watch.failure_status == DoesNotFitError.exit_status:
            return DoesNotFitError(message)
        return RankDiedError(message) if self._watch.failure_status == 1 else ConfigError(message)
