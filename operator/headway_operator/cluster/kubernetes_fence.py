"""The last look before a write leaves: whether the operator still leads.

Between a call's beginning and its first byte lie a wait for a free connection, or a new one, and turns of the
event loop; a process that was suspended there, and resumed after another took over, would send what it was
about to. So the question is asked again when the client hands the head, and then the body, to the connection:
no other code runs between that and the send.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace

import aiohttp

_check: ContextVar[Callable[[], None] | None] = ContextVar("check_before_sending", default=None)


@contextmanager
def checked_before_sending(check: Callable[[], None]) -> Iterator[None]:
    """Requests made inside are sent only if `check` raises nothing at that moment."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def fence() -> aiohttp.TraceConfig:
    """What makes a client session ask. Its requests raise what the check raises, and close the connection."""
    traces = aiohttp.TraceConfig()
    traces.on_request_headers_sent.append(_ask)
    traces.on_request_chunk_sent.append(_ask)
    return traces


async def _ask(session: aiohttp.ClientSession, context: SimpleNamespace, parameters: object) -> None:
    if (check := _check.get()) is not None:
        check()
