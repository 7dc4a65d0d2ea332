"""How requests and servers end: clients that leave, full queues, drains, and processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer

SLOW = {"HEADWAY_FAKE_STEP_SECONDS": "0.02"}
LONG = {"model": "tiny", "prompt": [50, 51, 52], "max_tokens": 400, "stream": True}
SHORT = {"model": "tiny", "prompt": [50], "max_tokens": 2}


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, limits=httpx.Limits(max_connections=200)) as client:
        yield client


class Stream:
    """One streamed completion, read by hand."""

    def __init__(self, client: httpx.Client, server: RunningServer, body: dict[str, Any]) -> None:
        request = client.build_request("POST", f"{server.url}/v1/completions", json=body)
        self.response = client.send(request, stream=True)
        self.lines = self.response.iter_lines()

    def first_event(self) -> str:
        return next(self.lines)

    def rest(self) -> list[str]:
        """All further events, without their prefix."""
        return [line.removeprefix("data: ") for line in self.lines if line]


def has_ended(process: psutil.Process, timeout_seconds: float = 10.0) -> bool:
    try:
        process.wait(timeout_seconds)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture(scope="module")
def slow_server(start_shared_server: StartServer) -> RunningServer:
    """20 ms per token; two requests may wait."""
    return start_shared_server("--max-waiting=2", "--ttft-target-milliseconds=60000", environment=SLOW)


@pytest.fixture
def one_at_a_time(slow_server: RunningServer) -> Iterator[RunningServer]:
    """The slow server while it runs one sequence at a time."""
    slow_server.admin("PATCH", "limits", {"max_num_seqs": 1})
    yield slow_server
    slow_server.admin("PATCH", "limits", {"max_num_seqs": 64})


def grown(before: Any, after: Any, *names: str) -> list[int]:
    return [after["counters"][name] - before["counters"][name] for name in names]


def waits_for(number: int, sample: Any) -> bool:
    """Whether `number` requests wait."""
    return bool(sample["gauges"]["waiting"] == number)


@pytest.mark.parametrize(
    ("path", "body", "want"),
    [
        ("completions", {"prompt": "a", "n": 3}, "n=3 makes 1 prompt of 3 choices"),
        ("completions", {"prompt": "a", "best_of": 4}, "best_of=4 makes 1 prompt of 4 choices"),
        ("completions", {"prompt": ["a", "b", "c"]}, "prompt makes 3 prompts of 1 choices"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 3}, "n=3 makes 1 prompt"),
    ],
)
def test_choices_that_can_never_wait_together_are_the_requests_fault(
    path: str, body: Any, want: str, slow_server: RunningServer, client: httpx.Client
) -> None:
    response = client.post(f"{slow_server.url}/v1/{path}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(want)
    assert error["message"].endswith("more than the 2 that may wait here at once (--max-waiting); send fewer")
    assert error["param"] == want.split("=")[0].split(" ")[0]


def test_a_client_that_leaves_frees_its_blocks(slow_server: RunningServer, client: httpx.Client) -> None:
    streams = []
    for _ in range(3):
        streams.append(Stream(client, slow_server, LONG))
        streams[-1].first_event()
    busy = slow_server.sample()
    assert busy["gauges"]["running"] == 3
    for stream in streams:
        stream.response.close()
    freed = slow_server.sample_until(lambda sample: sample["gauges"]["running"] == 0)
    assert freed["gauges"]["kv_blocks_used"] == 0
    assert grown(busy, freed, "aborted", "finished") == [3, 0]
    # Within two steps of learning of it, which some more went by for; nowhere near the 400 of the answer.
    assert freed["counters"]["steps"] - busy["counters"]["steps"] < 60


@pytest.mark.parametrize(
    ("is_streamed", "waited_milliseconds", "num_missed"),
    [(True, 0, 0), (False, 120_000, 1)],
    ids=["within the target", "when that has passed"],
)
def test_a_client_that_leaves_before_its_first_token_is_forgotten(
    one_at_a_time: RunningServer,
    client: httpx.Client,
    is_streamed: bool,  # noqa: FBT001
    waited_milliseconds: int,
    num_missed: int,
) -> None:
    server = one_at_a_time
    before = server.sample()
    holder = Stream(client, server, LONG)
    holder.first_event()
    body = json.dumps({**LONG, "stream": is_streamed}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Headway-Waited-Milliseconds: %d\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (waited_milliseconds, len(body), body)
        )
        server.sample_until(lambda sample: sample["gauges"]["waiting"] == 1)
    left = server.sample_until(lambda sample: sample["gauges"]["waiting"] == 0)
    assert left["gauges"]["running"] == 1
    assert grown(before, left, "aborted", "ttft_missed") == [1, num_missed]
    holder.response.close()


def test_a_client_that_leaves_in_the_middle_of_its_body_is_noted(slow_server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", slow_server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: left-early\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    assert slow_server.access_entry("left-early")["status"] == 499


def test_a_full_queue_answers_503_and_counts_a_miss(
    one_at_a_time: RunningServer, client: httpx.Client
) -> None:
    server = one_at_a_time
    before = server.sample()
    running = Stream(client, server, LONG)
    running.first_event()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(client.post, f"{server.url}/v1/completions", json=SHORT)
        server.sample_until(lambda sample: sample["gauges"]["waiting"] == 1)
        # One request of several choices, of which the queue takes only some: none of them is left behind.
        several = client.post(f"{server.url}/v1/completions", json={**LONG, "stream": False, "n": 2})
        assert several.status_code == 503
        server.sample_until(lambda sample: sample["gauges"]["waiting"] == 1)
        another = pool.submit(client.post, f"{server.url}/v1/completions", json=SHORT)
        server.sample_until(lambda sample: sample["gauges"]["waiting"] == 2)
        for stream in (True, False):
            refused = client.post(f"{server.url}/v1/completions", json={**SHORT, "stream": stream})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
            assert refused.json()["error"]["code"] == "queue_full"
        running.response.close()
        assert one.result().status_code == another.result().status_code == 200
    after = server.sample_until(lambda sample: grown(before, sample, "ttft_met") == [3])
    assert grown(before, after, "received", "rejected", "ttft_missed") == [7, 3, 3]
    assert sum(grown(before, after, "finished", "aborted", "errors", "rejected")) == 7


def test_a_drain_serves_what_still_comes_and_exits_with_0(
    start_server: StartServer, client: httpx.Client
) -> None:
    server = start_server(environment=SLOW)
    stream = Stream(client, server, {**LONG, "max_tokens": 60})
    stream.first_event()
    engine = server.children()
    server.signal(signal.SIGTERM)
    while client.get(f"{server.url}/ready").status_code == 200:
        pass
    assert server.sample()["draining"] is True
    assert client.get(f"{server.url}/health").status_code == 200
    # Late requests, on an open connection and on a new one.
    late = client.post(f"{server.url}/v1/completions", json=SHORT)
    assert (late.status_code, late.headers["connection"]) == (200, "close")
    assert httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code == 200
    assert stream.rest()[-1] == "[DONE]"
    # Requests that keep coming within a second keep it alive.
    assert client.post(f"{server.url}/v1/completions", json=SHORT).status_code == 200
    assert server.wait() == 0
    assert all(has_ended(process) for process in engine)


def test_a_server_that_nobody_asked_drains_at_once(start_server: StartServer) -> None:
    server = start_server()
    started_at = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - started_at < 5.0, "there was nothing to wait for"


def test_a_drain_that_takes_too_long_ends_requests_with_an_error(
    start_server: StartServer, client: httpx.Client
) -> None:
    server = start_server("--drain-timeout-seconds=0.5", environment=SLOW)
    stream = Stream(client, server, LONG)
    stream.first_event()
    server.signal(signal.SIGTERM)
    events = stream.rest()
    assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    assert server.wait() == 0


def test_a_second_signal_ends_everything_at_once(start_server: StartServer, client: httpx.Client) -> None:
    server = start_server(environment=SLOW)
    stream = Stream(client, server, LONG)
    stream.first_event()
    children = server.children()
    server.signal(signal.SIGTERM)
    while client.get(f"{server.url}/ready").status_code == 200:
        pass
    server.signal(signal.SIGTERM)
    assert server.wait(5) == 1
    assert all(has_ended(process) for process in children)


@pytest.mark.parametrize("way", ["killed", "crashed", "raised"])
def test_an_engine_that_dies_fails_every_request_and_the_server_ends(
    start_server: StartServer, client: httpx.Client, way: str
) -> None:
    server = start_server("--max-num-seqs=4", environment=SLOW)
    (engine,) = server.children()
    streams = [Stream(client, server, LONG) for _ in range(4)]
    for stream in streams:
        stream.first_event()
    with ThreadPoolExecutor(2) as pool:
        # The first of them makes the engine's step raise, once it gets a place.
        bodies: list[dict[str, Any]] = [{**SHORT, "prompt": [2]}, SHORT]
        waiting = []
        for number, body in enumerate(bodies, start=1):
            waiting.append(pool.submit(client.post, f"{server.url}/v1/completions", json=body))
            server.sample_until(partial(waits_for, number))
        died_at = time.monotonic()
        if way == "killed":
            engine.kill()
        elif way == "crashed":
            engine.send_signal(signal.SIGSEGV)
        else:
            streams.pop().response.close()
        for stream in streams:
            assert json.loads(stream.rest()[-1])["error"]["code"] == "engine_dead"
        assert [one.result().status_code for one in waiting] == [500, 500]
        if way != "raised":
            assert time.monotonic() - died_at < 1.0
    assert server.wait() == 1
    assert has_ended(engine)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_health_fails_while_a_server_without_engine_still_answers(
    start_server: StartServer, num_servers: int
) -> None:
    server = start_server(f"--api-server-count={num_servers}", environment=SLOW)
    (engine,) = (one for one in server.children() if "--engine" in one.cmdline())
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
        ThreadPoolExecutor(2) as pool,
    ):
        # A request whose body is still on its way is what the server waits for, up to two seconds.
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n{"
        )
        assert connection.recv(1024).startswith(b"HTTP/1.1 100 ")
        assert httpx.get(f"{server.url}/health").status_code == 200
        refusals = [
            pool.submit(first_refusal, "GET", f"{server.url}/health"),
            pool.submit(first_refusal, "POST", f"{server.url}/v1/completions", SHORT),
        ]
        engine.kill()
        for refusal in refusals:
            assert refusal.result().json()["error"]["code"] == "engine_dead"
    assert server.wait() == 1


def first_refusal(method: str, url: str, body: object = None) -> httpx.Response:
    """The first answer with status 503 of those asked for again and again.

    Connections to an HTTP process that has nothing to wait for just end.
    """
    deadline = time.monotonic() + 30
    with httpx.Client() as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = client.request(method, url, json=body)
                if answer.status_code == 503:
                    return answer
    raise AssertionError(f"{method} {url}: never 503")


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_parent_that_is_killed_leaves_neither_engine_nor_file(
    start_server: StartServer,
    client: httpx.Client,
    is_ready: bool,  # noqa: FBT001
) -> None:
    server = start_server(environment=SLOW if is_ready else {"HEADWAY_FAKE_NEVER_READY": "1"}, ready=is_ready)
    (engine,) = server.children()
    directory = json.loads(engine.cmdline()[-1])["directory"]
    if is_ready:
        Stream(client, server, LONG).first_event()
    server.process.kill()
    server.wait()
    assert has_ended(engine)
    assert not os.path.exists(directory)


def test_a_lifeline_that_ends_takes_both_processes_along(model_folder: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    port_file = tmp_path / "port"
    arguments = [str(model_folder), "--port=0", f"--port-file={port_file}", f"--lifeline-fd={read_end}"]
    process = subprocess.Popen(
        [sys.executable, os.path.join(os.path.dirname(__file__), "fake_server.py"), *arguments],
        pass_fds=(read_end,),
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
    deadline = time.monotonic() + 60
    while not port_file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (engine,) = psutil.Process(process.pid).children()
    directory = json.loads(engine.cmdline()[-1])["directory"]
    os.close(write_end)
    assert process.wait(10) == 1
    assert has_ended(engine)
    assert not os.path.exists(directory)


def test_before_the_engine_is_ready_clients_are_asked_to_wait(start_server: StartServer) -> None:
    server = start_server(environment={"HEADWAY_FAKE_NEVER_READY": "1"}, ready=False)
    assert httpx.get(f"{server.url}/health").status_code == 200
    not_ready = httpx.get(f"{server.url}/ready")
    assert (not_ready.status_code, not_ready.json()["error"]["message"]) == (503, "the engine is starting")
    for response in (
        httpx.post(f"{server.url}/v1/completions", json=SHORT),
        httpx.get(f"{server.url}/metrics"),
        server.admin("GET", "sample"),
    ):
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
