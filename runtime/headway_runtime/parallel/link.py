"""The way to rank 0 from elsewhere: connects, says hello, and answers its signs of life until they end.

Used by ranks and by nodes without rank 0. What is to be done when rank 0 is gone is for the user of it.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable

from headway_runtime.errors import ConfigError, RankDiedError
from headway_runtime.parallel import wire
from headway_runtime.parallel.messages import BYE, PING, PING_READY, Accepted, Hello, Refused

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
CONNECT_SECONDS = 10.0
# Without a sign of life for so many seconds, a rank 0 on another node is gone, though no word of it came.
MOST_SILENT_SECONDS = 60


def connect(host: str, port: int, timeout_seconds: float) -> socket.socket:
    """Retries while nobody listens there. RankDiedError when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    is_told = False
    while True:
        try:
            connection = socket.create_connection((host, port), min(CONNECT_SECONDS, timeout_seconds))
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RankDiedError(
                    f"rank 0 does not listen on {host} port {port} ({error}) after {timeout_seconds:g} s; "
                    "check --master-addr and --master-port, and that node 0 runs"
                ) from error
            if not is_told:
                logger.info("waiting for rank 0 on %s port %d (%s)", host, port, error)
                is_told = True
            time.sleep(RETRY_SECONDS)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def say_hello(connection: socket.socket, hello: Hello, timeout_seconds: float) -> Accepted:
    """Say it and await the answer; errors as for `await_answer`."""
    try:
        wire.send(connection, hello)
    except OSError as error:
        raise _not_let_in(error) from error
    return await_answer(connection, timeout_seconds)


def await_answer(connection: socket.socket, timeout_seconds: float) -> Accepted:
    """ConfigError when rank 0 refuses, RankDiedError when it does not answer in time or is gone."""
    connection.settimeout(timeout_seconds)
    try:
        answer = wire.receive(connection)
    except (OSError, EOFError, wire.BadMessageError) as error:
        raise _not_let_in(error) from error
    if isinstance(answer, Refused):
        raise ConfigError(f"rank 0 refuses this one: {answer.message}")
    if not isinstance(answer, Accepted):
        raise RankDiedError(f"rank 0 answered with {type(answer).__name__}; run one version on all nodes")
    return answer


def _not_let_in(error: Exception) -> RankDiedError:
    return RankDiedError(f"rank 0 did not let this one take part ({error}); see the log of node 0")


def answer_pings(
    connection: socket.socket,
    on_end: Callable[[bool], None],
    *,
    ends_in_silence: bool,
    on_ready: Callable[[], None] | None = None,
) -> threading.Thread:
    """On a thread, until rank 0 is gone. on_end: called then; True if it ended in good order.

    on_ready: called with each ping from when on all ranks can compute.
    """

    def listen() -> None:
        silent_seconds = 0
        connection.settimeout(1.0)
        while True:
            try:
                got = connection.recv(1)
            except TimeoutError:
                # Counted in seconds that this process lived through.
                silent_seconds += 1
                if ends_in_silence and silent_seconds >= MOST_SILENT_SECONDS:
                    got = b""
                else:
                    continue
            except OSError:
                got = b""
            silent_seconds = 0
            try:
                if got in (PING, PING_READY):
                    connection.sendall(PING)
                    if got == PING_READY and on_ready is not None:
                        on_ready()
                    continue
            except OSError:
                got = b""
            on_end(got == BYE)
            return

    thread = threading.Thread(target=listen, name="headway-rank-0", daemon=True)
    thread.start()
    return thread
