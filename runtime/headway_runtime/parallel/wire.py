"""Messages between ranks over a stream socket: a length of four bytes, then a pickle that holds data alone.

A pickle may name any function of any module, to be called where it is read. Here only data classes and
enumerations of this package, and arrays of numbers, are known. Of a stranger, `receive_first` takes those of
`messages` alone, so that nobody can even have a module imported.
"""

import array
import enum
import importlib
import io
import pickle
import socket
import struct
from dataclasses import is_dataclass

from headway_runtime.errors import HeadwayRuntimeError

LENGTH = struct.Struct("!I")
PACKAGE = "headway_runtime."
# Longer ones are not ours: the longest tell a step of a hundred thousand tokens.
MOST_BYTES = 1 << 28
# Before it is known who speaks.
MOST_HELLO_BYTES = 1 << 16
ARRAYS = {("array", "_array_reconstructor"), ("array", "array")}
FIRST_MODULES = frozenset({f"{PACKAGE}parallel.messages"})


class BadMessageError(HeadwayRuntimeError):
    """What came is no message of a rank."""


class _DataUnpickler(pickle.Unpickler):
    """modules: whose classes are known; None: all of this package's."""

    def __init__(self, body: bytes, modules: frozenset[str] | None) -> None:
        super().__init__(io.BytesIO(body))
        self._modules = modules

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in ARRAYS:
            return getattr(array, name)
        is_known = module.startswith(PACKAGE) if self._modules is None else module in self._modules
        if is_known and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        raise BadMessageError(f"a message names {module}.{name}, which is no data of this package")


def encode(message: object) -> bytes:
    """With its length."""
    body = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes, modules: frozenset[str] | None = None) -> object:
    """BadMessageError for what is no message. modules: of whose classes alone it may be."""
    try:
        return _DataUnpickler(body, modules).load()
    except BadMessageError:
        raise
    except Exception as error:
        raise BadMessageError(f"a message cannot be read ({type(error).__name__}: {error})") from error


def send(connection: socket.socket, message: object) -> None:
    """OSError when the other side is gone."""
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> object:
    """The next message; waits for it. EOFError or another OSError when the other side is gone."""
    return decode(_body(connection, MOST_BYTES))


def receive_first(connection: socket.socket) -> object:
    """The same for a message of who is not known yet, or has little to say: short, and one of `messages`."""
    return decode(_body(connection, MOST_HELLO_BYTES), FIRST_MODULES)


def _body(connection: socket.socket, most_bytes: int) -> bytes:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > most_bytes:
        raise BadMessageError(f"a message of {length} bytes; want at most {most_bytes}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError("the connection has ended")
        found += part
    return bytes(found)
