"""Messages between ranks over a stream socket: a length of four bytes, then a pickle that holds data alone.

A pickle may name any function of any module, to be called where it is read. Here only data classes and
enumerations of this package, and arrays of numbers, are known, so a message can make values and do nothing.
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


class BadMessageError(HeadwayRuntimeError):
    """What came is no message of a rank."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in ARRAYS:
            return getattr(array, name)
        if module.startswith(PACKAGE) and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        raise BadMessageError(f"a message names {module}.{name}, which is no data of this package")


def encode(message: object) -> bytes:
    """With its length."""
    body = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> object:
    """BadMessageError for what is no message."""
    try:
        return _DataUnpickler(io.BytesIO(body)).load()
    except BadMessageError:
        raise
    except Exception as error:
        raise BadMessageError(f"a message cannot be read ({type(error).__name__}: {error})") from error


def send(connection: socket.socket, message: object) -> None:
    """OSError when the other side is gone."""
    connection.sendall(encode(message))


def receive(connection: socket.socket, most_bytes: int = MOST_BYTES) -> object:
    """The next message; waits for it. EOFError or another OSError when the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > most_bytes:
        raise BadMessageError(f"a message of {length} bytes; want at most {most_bytes}")
    return decode(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError("the connection has ended")
        found += part
    return bytes(found)
