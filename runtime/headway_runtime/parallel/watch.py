"""Rank 0's watch over the others: a thread that starts this node's ranks, and notices when any rank is lost.

Each second it sends a sign of life to every rank and node and wants one back. A rank that has ended, that
has been silent for MOST_SILENT_TICKS of them once all are ready, or whose node is gone, is lost, and then all
are: it ends this node's ranks, and closes every connection, by which the other nodes end theirs. So whoever
waits for a lost rank's tensors gets an error; on a device `let_go` sees to that. The same if rank 0 waits for
its device longer than one exchange of tensors may take: not every kernel in which GPUs wait for each other
has a limit of its own, and all ranks may live and answer while one of them has launched another work than the
others. Knows nothing of tensors.
"""

import contextlib
import logging
import os
import queue
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from headway_runtime.config import ParallelConfig
from headway_runtime.parallel import wire
from headway_runtime.parallel.messages import (
    BYE,
    FAILED,
    PING,
    PING_READY,
    RANK_ENDED,
    Failed,
    Hello,
    RankEnded,
)
from headway_runtime.parallel.spawn import RankLaunch, end_rank, start_rank, told_status

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
MOST_SILENT_TICKS = 7
# How long is waited for the word how a rank ended, once its connection has.
LAST_WORDS_SECONDS = 2.0
END_SECONDS = 5.0

# Called with what is wrong, and whether a flag is at fault.
# Why, and with which status the rank has ended: that of a ConfigError where it was refused, else 1.
OnFailure = Callable[[str, int], None]


@dataclass(slots=True)
class _Peer:
    hello: Hello
    connection: socket.socket
    silent_ticks: int = 0


class RankWatch:
    """Starts at once. `failure` is set once, and then `has_failed`."""

    def __init__(
        self, parallel: ParallelConfig, launches: list[RankLaunch], on_failure: OnFailure | None
    ) -> None:
        self._parallel = parallel
        self._launches = launches
        self.on_failure = on_failure
        # Called after that: lets go who waits for tensors on a device, whom no connection's end reaches.
        self.let_go: Callable[[], None] | None = None
        self.failure: str | None = None
        # That the failed rank has ended with: 1, but for one that was refused.
        self.failure_status = 1
        self.has_failed = threading.Event()
        # Silence counts from then on: loading keeps some things waiting.
        self.is_ready = False
        self._new: queue.SimpleQueue[_Peer] = queue.SimpleQueue()
        self._others: list[socket.socket] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._suspects: dict[int, float] = {}
        # Since when rank 0 has been waiting for its device.
        self._waits_since: float | None = None
        self._is_closing = threading.Event()
        self._pid = os.getpid()
        self._environment: Mapping[str, str] = dict(os.environ)
        self._thread = threading.Thread(target=self._run, name="headway-ranks", daemon=True)
        self._thread.start()

    def add(self, hello: Hello, connection: socket.socket) -> None:
        """Watch one more. With the role "calls" it stays the caller's, and only its end is made known."""
        if hello.role == "calls":
            self._others.append(connection)
        else:
            connection.setblocking(False)
            self._new.put(_Peer(hello, connection))
            if not self._thread.is_alive():
                self._let_go_of_new()  # it came while this was closed

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """See `Ranks.waiting`. Takes no lock: what is noticed a tick later is as good."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def close(self) -> None:
        """End all ranks in good order; again does nothing."""
        if os.getpid() != self._pid:
            return  # a fork of this process has no ranks
        self._is_closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * END_SECONDS)
            if not self._thread.is_alive():
                self._let_go_of_new()

    def _let_go_of_new(self) -> None:
        """Close the connections of those that nobody will watch any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._new.get_nowait().connection.close()

    def _run(self) -> None:
        try:
            for launch in self._launches:
                self._processes[launch.rank] = start_rank(launch, self._environment)
            self._watch()
        except OSError as error:
            self._fail(f"the ranks of this node cannot be started ({error}); free some memory or processes")
        except Exception as error:
            # Whatever it is: without a watch a lost rank would keep the others waiting for ever.
            logger.exception("the watch over the ranks has failed")
            self._fail(f"the watch over the ranks has failed ({type(error).__name__}: {error})")
        if self.failure is None:
            self._say_goodbye()
        self._end_all()
        for key in list(self._selector.get_map().values()):
            key.data.connection.close()
        self._selector.close()

    def _watch(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while self.failure is None and not self._is_closing.is_set():
            while not self._new.empty():
                peer = self._new.get()
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            timeout = min(max(0.0, next_tick - time.monotonic()), 0.1 if not self.is_ready else 0.25)
            for key, _ in self._selector.select(timeout) if self._selector.get_map() else []:
                self._read(key.data)
            if not self._selector.get_map():
                self._is_closing.wait(timeout)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick()
            self._look_at_processes()

    def _tick(self) -> None:
        ping = PING_READY if self.is_ready else PING
        for key in list(self._selector.get_map().values()):
            peer: _Peer = key.data
            with contextlib.suppress(OSError):  # full, or its end will be read
                peer.connection.send(ping)
            peer.silent_ticks += 1
            if self.is_ready and peer.silent_ticks > MOST_SILENT_TICKS:
                seconds = MOST_SILENT_TICKS * TICK_SECONDS
                self._fail(f"{self._name(peer.hello)} has not answered for {seconds:g} s")
                return
        since, limit = self._waits_since, self._parallel.timeout_seconds
        if since is not None and time.monotonic() - since > limit:
            self._fail(
                f"a rank has not done its part of a step within {limit:g} s "
                "(--distributed-timeout-seconds), and the others wait for it"
            )

    def _look_at_processes(self) -> None:
        if self.failure is not None:
            return
        now = time.monotonic()
        for rank, process in self._processes.items():
            status = process.poll()
            if status is not None and not self._is_watched(rank):
                self._lost(rank, status)
                return
            if status is not None:
                # Perhaps its last word, why it failed, is yet to be read.
                self._suspects.setdefault(rank, now + 0.5)
        for rank, until in self._suspects.items():
            if now >= until:
                known = self._processes.get(rank)
                self._lost(rank, None if known is None else known.poll())
                return

    def _is_watched(self, rank: int) -> bool:
        return any(key.data.hello.rank == rank for key in self._selector.get_map().values())

    def _read(self, peer: _Peer) -> None:
        try:
            got = peer.connection.recv(1)
            if got in (FAILED, RANK_ENDED):
                peer.connection.settimeout(LAST_WORDS_SECONDS)
                self._hear(wire.receive_first(peer.connection))
                peer.connection.setblocking(False)
        except BlockingIOError:
            return
        except (OSError, EOFError, wire.BadMessageError):
            got = b""
        if got:
            peer.silent_ticks = 0
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if self.failure is None:
            if peer.hello.role == "node":
                # Of a node that ends with its ranks, what became of them is the better word.
                self._suspects.setdefault(-peer.hello.node_rank, time.monotonic() + 0.5)
            else:
                self._suspects.setdefault(peer.hello.rank, time.monotonic() + LAST_WORDS_SECONDS)

    def _hear(self, message: object) -> None:
        match message:
            case Failed():
                self._fail(message.message, message.status)
            case RankEnded():
                self._lost(message.rank, message.status)
            case _:
                raise wire.BadMessageError(f"{type(message).__name__} is nothing that a rank says here")

    def _lost(self, rank: int, status: int | None) -> None:
        if rank < 0:
            self._fail(f"node {-rank} has ended, or cannot be reached any more")
            return
        what = "cannot be reached any more" if status is None else told_status(status)
        process = self._processes.get(rank)
        own = "" if process is None else f" (process {process.pid})"
        self._fail(f"rank {rank} on node {self._parallel.node_of(rank)}{own} {what}")

    def _name(self, hello: Hello) -> str:
        if hello.role == "node":
            return f"node {hello.node_rank}"
        return f"rank {hello.rank} on node {hello.node_rank} (process {hello.pid})"

    def _fail(self, message: str, status: int = 1) -> None:
        if self.failure is not None:
            return
        self.failure_status = status
        self.failure = (
            message if status != 1 else f"{message}; it holds a part of the model, so the engine ends"
        )
        self.has_failed.set()
        self._end_all()
        if self.on_failure is not None:
            self.on_failure(self.failure, status)
        if self.let_go is not None:
            try:
                self.let_go()
            except RuntimeError:
                logger.exception("whoever waits for tensors of a lost rank may go on waiting")

    def _say_goodbye(self) -> None:
        for key in self._selector.get_map().values():
            with contextlib.suppress(OSError):
                key.data.connection.send(BYE)
        until = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def _end_all(self) -> None:
        """At once; those of other nodes by the end of their connections."""
        for process in self._processes.values():
            end_rank(process)
        watched = [key.data.connection for key in self._selector.get_map().values()]
        for connection in [*watched, *self._others]:
            with contextlib.suppress(OSError):
                # A close alone would not wake who reads from it.
                connection.shutdown(socket.SHUT_RDWR)
