"""`headway serve` on a node other than 0: starts this node's ranks, minds them, and answers probes alone.

    rank 0 cannot be found in time      ends with 1; it refuses this node's flags: ends with 2
    a rank of this node ends            rank 0 is told how and ends the engine; this ends with 1 (flags: 2)
    rank 0 ends in good order           ends with 0
    rank 0 is gone, or loses any rank   this node's ranks are killed; ends with 1
    SIGTERM, SIGINT                     goes on computing while rank 0 drains, for --drain-timeout-seconds at
                                        most, then ends with 0
    a second signal                     ends at once, with 1
    this process is killed              the ranks see the end of their pipe and end at once

`/health` is 200 while the ranks live, `/ready` once all ranks of all nodes have loaded: probes as of a pod
with an engine. All else is 404 with the word that node 0 answers. Imports no torch.
"""

import contextlib
import http.server
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.lifeline import watch_lifeline
from headway_runtime.parallel import wire
from headway_runtime.parallel.agreement import agreed_words
from headway_runtime.parallel.link import answer_pings, connect, say_hello
from headway_runtime.parallel.messages import RANK_ENDED, Hello, RankEnded
from headway_runtime.parallel.spawn import RankLaunch, end_rank, start_rank, told_status
from headway_runtime.server.engine_handle import engine_environment
from headway_runtime.server.listening import listen, write_port_file
from headway_runtime.server.messages import EXIT_STATUSES_REFUSED
from headway_runtime.server.options import ServeOptions
from headway_runtime.server.tls import tls_context

logger = logging.getLogger(__name__)

# How long the end of rank 0 may take to be heard of after its ranks have ended by it.
LAST_WORDS_SECONDS = 1.0
PROBE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _LeaderEnded:
    is_good: bool


@dataclass(frozen=True, slots=True)
class _Ended:
    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class _Signalled:
    name: str


def run(options: ServeOptions) -> int:
    """Compute for node 0 until the end; returns the exit status."""
    node = _Node(options)
    if options.lifeline_fd is not None:
        watch_lifeline(options.lifeline_fd, node.kill)
    try:
        return node.run()
    except HeadwayRuntimeError as error:
        print(f"headway serve: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, ConfigError) else 1
    finally:
        node.kill()


class _Node:
    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._events: queue.SimpleQueue[_LeaderEnded | _Ended | _Signalled] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.is_ready = False
        self.is_ending = False

    def run(self) -> int:
        options = self._options
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, lambda got, _: self._events.put(_Signalled(signal.Signals(got).name)))
        self._answer_probes()
        connection = self._join()
        try:
            self._start_ranks()
            return self._mind(connection)
        finally:
            connection.close()
            logger.info("node %d ends", options.engine.parallel.node_rank)

    def kill(self) -> None:
        """End this node's ranks at once."""
        for process in self._processes.values():
            end_rank(process)

    def _join(self) -> socket.socket:
        """Until rank 0 has let this node take part; a signal ends the waiting."""
        engine = self._options.engine
        parallel = engine.parallel
        words = agreed_words(engine)
        found: queue.SimpleQueue[socket.socket | HeadwayRuntimeError] = queue.SimpleQueue()

        def join() -> None:
            try:
                connection = connect(parallel.master_addr, parallel.master_port, parallel.timeout_seconds)
                hello = Hello("node", parallel.own_ranks[0], parallel.node_rank, os.getpid(), agreed=words)
                say_hello(connection, hello, parallel.timeout_seconds)
                found.put(connection)
            except HeadwayRuntimeError as error:
                found.put(error)

        threading.Thread(target=join, name="join", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                result = found.get(timeout=0.1)
                if isinstance(result, HeadwayRuntimeError):
                    raise result
                break
            if not self._events.empty():
                raise HeadwayRuntimeError("ended by a signal before node 0 was found")

        def ready() -> None:
            self.is_ready = True

        def ended(is_good: bool) -> None:  # noqa: FBT001 - the type of the callback
            self._events.put(_LeaderEnded(is_good))

        answer_pings(result, ended, ends_in_silence=True, on_ready=ready)
        return result

    def _start_ranks(self) -> None:
        engine = self._options.engine
        parallel = engine.parallel
        environment = engine_environment(os.environ, engine.num_threads)
        for local_rank, rank in enumerate(parallel.own_ranks):
            launch = RankLaunch(
                rank=rank,
                node_rank=parallel.node_rank,
                local_rank=local_rank,
                host=parallel.master_addr,
                port=parallel.master_port,
                token="",
                parent_pid=os.getpid(),
                timeout_seconds=parallel.timeout_seconds,
                num_threads=engine.num_threads,
                model_path=engine.model_path,
                has_far_leader=True,
                log_level=self._options.log_level,
            )
            process = self._processes[rank] = start_rank(launch, environment)
            threading.Thread(target=self._await_end, args=(rank, process), daemon=True).start()

    def _await_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._events.put(_Ended(rank, process.wait()))

    def _mind(self, connection: socket.socket) -> int:
        deadline: float | None = None
        while True:
            try:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                logger.warning("rank 0 did not end in time; this node ends")
                return 0
            match event:
                case _LeaderEnded():
                    return self._leader_ended(is_good=event.is_good)
                case _Ended():
                    return self._rank_ended(event, connection)
                case _Signalled() if deadline is None:
                    seconds = self._options.drain_timeout_seconds
                    logger.info("%s: computing on until rank 0 ends, for at most %g s", event.name, seconds)
                    deadline = time.monotonic() + seconds
                    self.is_ending = True
                case _Signalled():
                    logger.warning("%s again: ending at once", event.name)
                    return 1

    def _leader_ended(self, *, is_good: bool) -> int:
        if not is_good and not self.is_ending:
            logger.error("rank 0 is gone; this node ends, too")
        return 0 if is_good or self.is_ending else 1

    def _rank_ended(self, ended: _Ended, connection: socket.socket) -> int:
        """Perhaps only because rank 0 has ended."""
        with contextlib.suppress(OSError):
            connection.sendall(RANK_ENDED + wire.encode(RankEnded(ended.rank, ended.status)))
        until = time.monotonic() + LAST_WORDS_SECONDS
        while ended.status in (0, 1) and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                if isinstance(event, _LeaderEnded):
                    return self._leader_ended(is_good=event.is_good)
        logger.error("rank %d %s; this node ends, too", ended.rank, told_status(ended.status))
        return ended.status if ended.status in EXIT_STATUSES_REFUSED else 1

    def _answer_probes(self) -> None:
        options = self._options
        (listener,) = listen(options.host, options.port)
        listener.setblocking(True)
        server = _ProbeServer(listener, self)
        if options.tls is not None:
            server.socket = tls_context(options.tls).wrap_socket(listener, server_side=True)
        port = listener.getsockname()[1]
        if options.port_file is not None:
            write_port_file(Path(options.port_file), port)
        threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()
        logger.info(
            "node %d answers probes on %s port %d", options.engine.parallel.node_rank, options.host, port
        )

    @property
    def why_not_ready(self) -> str | None:
        if self.is_ending:
            return "the node is ending"
        return None if self.is_ready else "not all ranks have loaded their share of the model"


class _ProbeServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, node: _Node) -> None:
        super().__init__(listener.getsockname()[:2], _Probe, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.node = node


class _Probe(http.server.BaseHTTPRequestHandler):
    timeout = PROBE_SECONDS

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _ProbeServer)
        match self.path.partition("?")[0]:
            case "/health" | "/ping":
                self._answer(200, {"status": "ok"})
            case "/ready":
                reason = server.node.why_not_ready
                self._answer(200 if reason is None else 503, {"status": reason or "ready"})
            case _:
                message = "this node computes for node 0, which answers requests; ask there"
                self._answer(404, {"error": {"message": message, "code": "not_node_0"}})

    do_HEAD = do_POST = do_GET  # noqa: N815 - named by the base class

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - named by the base class
        logger.debug(format, *arguments)
