"""Proof, from the kernel, that a replica took nothing of a request whose connection closed without an answer.

A request may be sent again only if no replica can have taken it. On a kept-alive connection that is in doubt:
the replica may have closed it, idle, while the request was on its way, or have read the request and died.
TCP knows. A FIN carries the number of the last byte that the other side's kernel had received when it closed;
so if the connection ended in order and not one byte sent since `Evidence` was made is acknowledged, the
request arrived at a closed socket. A reset carries no such number and proves nothing.

Linux tells the count in TCP_INFO (`tcpi_bytes_acked`, since 4.2). Elsewhere nothing is ever proven.
The socket is duplicated, because it must be asked after the event loop has closed its own handle.
"""

import errno
import os
import socket
import struct
import sys

# In struct tcp_info, see linux/tcp.h: tcpi_state is the first byte, tcpi_bytes_acked the eight from 120 on.
_ACKNOWLEDGED_OFFSET = 120
_INFO_BYTES = 128
_CLOSE_WAIT = 8  # a FIN has come, and no reset since


class Evidence:
    """What had been acknowledged before the request was sent. Close it: it holds the connection open."""

    __slots__ = ("_before", "_socket")

    def __init__(self, file_descriptor: int, family: int) -> None:
        # Family and type are given so that no system call has to find them out.
        self._socket = socket.socket(family, socket.SOCK_STREAM, fileno=os.dup(file_descriptor))
        _, self._before = _state_and_acknowledged_bytes(self._socket)

    def proves_nothing_was_taken(self, error: BaseException) -> bool:
        """`error` is how the connection ended, from aiohttp, before any byte of an answer."""
        state, after = _state_and_acknowledged_bytes(self._socket)
        ended_in_order = (
            state == _CLOSE_WAIT
            or not isinstance(error, OSError)
            or error.errno == errno.EPIPE  # writing after a FIN and then a reset
        )
        return ended_in_order and self._before > 0 and after == self._before

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()


def _state_and_acknowledged_bytes(connection: socket.socket) -> tuple[int, int]:
    """The connection's state, and how many of our bytes arrived (the handshake is one); zeros if unknown."""
    if sys.platform != "linux":
        return 0, 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0, 0
    if len(info) < _INFO_BYTES:
        return 0, 0
    return info[0], int(struct.unpack_from("=Q", info, _ACKNOWLEDGED_OFFSET)[0])
