"""What a request has made goes when it ends, and not when the garbage collector comes by."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_REQUESTS = 400


def test_requests_leave_no_garbage(start_server: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "garbage"
    server = start_server(environment={"HEADWAY_FAKE_GARBAGE_FILE": str(file)})

    def ask(number: int) -> None:
        """Half of them on a connection of their own, half of them streamed, and some that end early."""
        with contextlib.ExitStack() as stack:
            client = shared if number % 2 else stack.enter_context(httpx.Client(base_url=server.url))
            asked = {"prompt": [50, 51, 52]}, {"messages": [{"role": "user", "content": "fox"}]}
            path, question = ("chat/completions", asked[1]) if number % 10 == 9 else ("completions", asked[0])
            body = {"max_tokens": 8, "stream": number % 4 < 2, **question}
            with client.stream("POST", f"/v1/{path}", json=body, timeout=30) as response:
                assert response.status_code == 200
                if number % 20 != 8:
                    response.read()

    with httpx.Client(base_url=server.url) as shared, ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(100)))  # what is made once and kept
        before = len(collections_after(file, 0))
        list(pool.map(ask, range(NUM_REQUESTS)))
        found = collections_after(file, before)
    # One circle of references in a request is enough for 25 objects of each.
    assert sum(found) < NUM_REQUESTS, f"{sum(found)} objects of {NUM_REQUESTS} requests"


def collections_after(file: Path, before: int) -> list[int]:
    """What each collection found, but for the first so many, once two have begun and ended from now on."""

    def lines() -> list[str]:
        return file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []

    most, deadline = len(lines()) + 2, time.monotonic() + 30
    while len(lines()) < most:
        assert time.monotonic() < deadline, "the collector did not look"
        time.sleep(0.05)
    return [int(line) for line in lines()[before:]]
