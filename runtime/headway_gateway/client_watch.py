"""Notices that a client has left where its connection does not say so by itself.

That is where nothing is read from it any more: it has closed its half, as it may once it has sent all, or it
sends ahead more than is read before its turn. Who closes all sends the same FIN as who closes a half, so the
one way to know is to send something: to a socket that nobody has any more the other side's kernel answers
with a reset. An interim response (RFC 9110, 15.2.1) may be sent before the final one at any time, and clients
throw it away; so they do with a comment between the events of a stream. One of them is sent at once to who
has closed a half, and to both now and then; an answer's own bytes do the same. What came of it the kernel
tells (on Linux by the connection's state).
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable

ASK_SECONDS = 5.0
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.01, 1.0
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"  # as a chunk
_CLOSED = 7  # TCP_CLOSE of linux/tcp_states.h; struct tcp_info begins with the state


class Watch:
    """One connection's. is_blind: whether nothing is read though something is in hand, else it rests.
    question: what can be sent now; empty where nothing can."""

    __slots__ = ("_ask_at", "_delay", "_is_blind", "_loop", "_question", "_timer", "_transport")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        is_blind: Callable[[], bool],
        question: Callable[[], bytes],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._is_blind = is_blind
        self._question = question
        self._timer: asyncio.TimerHandle | None = None
        self._ask_at = 0.0
        self._delay = LONGEST_LOOK_SECONDS

    def begin(self, *, at_once: bool) -> None:
        """Look from now on. at_once: for it may have left just now."""
        if at_once:
            self.stop()
            self._delay = FIRST_LOOK_SECONDS
            self._ask_at = self._loop.time()
            self._look()
        elif self._timer is None:
            self._delay = LONGEST_LOOK_SECONDS
            self._ask_at = self._loop.time() + self._delay
            self._timer = self._loop.call_later(self._delay, self._look)

    def stop(self) -> None:
        """Nobody is there to be looked after."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._transport.is_closing() or not self._is_blind():
            return
        if _is_broken(self._transport):
            self._transport.abort()
            return
        if self._loop.time() >= self._ask_at and (question := self._question()):
            self._transport.write(question)
            self._ask_at = self._loop.time() + ASK_SECONDS
        self._timer = self._loop.call_later(self._delay, self._look)
        self._delay = min(self._delay * 2, LONGEST_LOOK_SECONDS)


def _is_broken(transport: asyncio.Transport) -> bool:
    """Whether the other side's kernel has reset the connection, or has been silent for too long."""
    raw = transport.get_extra_info("socket")
    try:
        with socket.socket(raw.family, socket.SOCK_STREAM, fileno=os.dup(raw.fileno())) as same:
            if sys.platform != "linux":
                return same.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            return same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] == _CLOSED
    except OSError:
        return True
