"""Waits, on a thread of its own, until all ranks and nodes have said hello to rank 0; refuses who may not.

It needs no torch, so the ranks find each other while everybody imports it. One who is refused does no harm:
the place stays free for another until the time is up.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping

from headway_runtime.config import ParallelConfig
from headway_runtime.errors import RankDiedError
from headway_runtime.parallel import wire
from headway_runtime.parallel.agreement import difference
from headway_runtime.parallel.messages import PROTOCOL, Accepted, Hello, Refused
from headway_runtime.parallel.watch import RankWatch

logger = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
# Of a Hello, which anybody may send.
_TYPES = {
    "role": str,
    "rank": int,
    "node_rank": int,
    "pid": int,
    "token": str,
    "protocol": int,
    "agreed": dict,
}


class Gathering:
    """Starts at once. Owns the listener, and the connections for calls until they are taken."""

    def __init__(
        self,
        listener: socket.socket,
        parallel: ParallelConfig,
        token: str,
        agreed: Mapping[str, object],
        watch: RankWatch,
    ) -> None:
        """agreed: what other nodes must say alike. token: what this node's ranks must."""
        self._listener, self._parallel = listener, parallel
        self._token, self._agreed, self._watch = token, agreed, watch
        self._missing = {(role, rank) for rank in range(1, parallel.size) for role in ("calls", "watch")}
        self._missing |= {("node", parallel.ranks_of(node)[0]) for node in range(1, parallel.num_nodes)}
        self._error: RankDiedError | None = None
        self._is_closing = False
        # Of what is missing and who has come: each is welcomed by a thread of its own.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="headway-gathering", daemon=True)
        self.calls: dict[int, socket.socket] = {}
        # This process' address for the others.
        self.host = "127.0.0.1"
        self._thread.start()

    def wait(self) -> None:
        """Until all are there. RankDiedError says who did not come; returns, too, when a rank is lost."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nobody else may come; who has, is let go."""
        with self._lock:
            self._is_closing = True
        self._thread.join()
        for connection in self.calls.values():
            connection.close()

    def _run(self) -> None:
        """Until every rank has both its connections, and every other node its own."""
        deadline = time.monotonic() + self._parallel.timeout_seconds
        self._listener.settimeout(0.1)
        with self._listener:
            while self._missing and not self._is_closing and self._watch.failure is None:
                if time.monotonic() > deadline:
                    self._error = RankDiedError(self._told_missing())
                    return
                with contextlib.suppress(TimeoutError):
                    connection, _ = self._listener.accept()
                    # One that connects and says nothing keeps nobody else waiting.
                    threading.Thread(
                        target=self._welcome, args=(connection,), name="headway-hello", daemon=True
                    ).start()

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_SECONDS)
        try:
            hello = wire.receive_first(connection)
            with self._lock:
                self._take(hello, connection)
        except (OSError, EOFError, wire.BadMessageError) as error:
            logger.warning("somebody connected who is no rank of this engine: %s", error)
            connection.close()

    def _take(self, hello: object, connection: socket.socket) -> None:
        """Give it its place, or tell it why it has none."""
        refusal = "rank 0 gathers no more ranks" if self._is_closing else self._refusal(hello)
        if refusal is not None:
            logger.warning("refused: %s", refusal)
            wire.send(connection, Refused(refusal))
            connection.close()
            return
        assert isinstance(hello, Hello)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hello.role != "calls":
            wire.send(connection, Accepted())
        if hello.node_rank > 0:
            self.host = connection.getsockname()[0]
        if hello.role == "calls":
            self.calls[hello.rank] = connection
        self._watch.add(hello, connection)
        self._missing.remove((hello.role, hello.rank))

    def _refusal(self, hello: object) -> str | None:
        if not isinstance(hello, Hello):
            return "want a Hello first"
        for name, kind in _TYPES.items():
            value = getattr(hello, name, None)
            if type(value) is not kind:
                return f"{name}={value!r} of a Hello: want {kind.__name__}; run one version on all nodes"
        who = f"node {hello.node_rank}"
        if hello.protocol != PROTOCOL:
            return f"{who} speaks version {hello.protocol}, rank 0 {PROTOCOL}; run one version on all nodes"
        token = hello.token.encode(errors="replace")
        if hello.node_rank == 0 and not secrets.compare_digest(token, self._token.encode()):
            return "a rank of node 0 that its engine has not started; give other nodes a --node-rank above 0"
        if hello.role == "node":
            other = difference(hello.agreed, self._agreed)
            if other is not None:
                return f"{who}: {other}"
        if (hello.role, hello.rank) not in self._missing:
            return f"{who}: rank {hello.rank} is here already, or unknown; give each node its own --node-rank"
        if (node := self._parallel.node_of(hello.rank)) != hello.node_rank:
            return f"{who}: rank {hello.rank} is of node {node}; give each node its own --node-rank"
        return None

    def _told_missing(self) -> str:
        ranks = sorted({rank for _, rank in self._missing})
        nodes = sorted({self._parallel.node_of(rank) for rank in ranks})
        seconds = self._parallel.timeout_seconds
        return (
            f"ranks {', '.join(map(str, ranks))} on nodes {', '.join(map(str, nodes))} did not come within "
            f"{seconds:g} s; see their logs, check --master-addr and --master-port there, or raise "
            "--distributed-timeout-seconds"
        )
