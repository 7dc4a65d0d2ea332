"""Waiting for facts, and a free port, for tests that run the real parts together."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Await a fact: polls a function until what it returns is true, and returns that."""

    async def wait(fact: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := fact()):
            assert time.monotonic() < deadline, f"not so within {seconds:g} s"
            await asyncio.sleep(0.05)
        return value

    return wait


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
