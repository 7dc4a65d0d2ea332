"""The sockets a server listens on, the file that says which port it got, and how many files it may open."""

import contextlib
import os
import resource
import socket
from pathlib import Path

from headway_runtime.errors import ConfigError

LISTEN_BACKLOG = 2048
# Each costs 3 us when a single connection comes, and asking /health on a new one takes 200.
ACCEPTED_PER_ROUND = 16
# Files besides connections: the interpreter's, the model's, the engine's.
SPARE_FILES = 256


def listen(host: str, port: int, number: int = 1) -> list[socket.socket]:
    """`number` listening sockets on one port, among which the kernel shares out the connections.

    ConfigError if the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host={host!r}: {error}; give an address of this machine") from error
    listeners: list[socket.socket] = []
    try:
        if number > 1 and port != 0:
            # Sockets that share would also share with another server's that do, and nobody would be told.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        for _ in range(number):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if number > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
            listener.setblocking(False)
            # Port 0 became a number; the other sockets are to have the same.
            address = (address[0], listener.getsockname()[1], *address[2:])
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(
            f"--host={host!r} --port={port}: cannot listen there ({error}); choose another, or --port 0"
        ) from error
    return listeners


def doors(listener: socket.socket, number: int = ACCEPTED_PER_ROUND) -> list[socket.socket]:
    """`listener` and copies of it, for an event loop that accepts one connection of each in a round.

    One in a round is libuv's rule (its pull request 3696). With a single door a probe that comes behind a
    crowd waits for as many rounds as there are connections before it, each with the tokens of all streams.
    """
    return [listener, *(listener.dup() for _ in range(number - 1))]


def allow_connections(number: int) -> int:
    """Let this process and its children have that many open; returns how many the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # forbidden by a sandbox: what there is must do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return number if soft == resource.RLIM_INFINITY else max(1, min(number, soft - SPARE_FILES))


def write_port_file(path: Path, port: int) -> None:
    """Write the number so that no reader ever sees half of it. ConfigError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{port}\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--port-file={str(path)!r}: cannot be written ({error}); give another path"
        ) from error
