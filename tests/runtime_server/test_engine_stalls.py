"""An engine process that lives and does not answer: who is told, and who is not fooled."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx2 as httpx
import psutil

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

SLOW = {"HEADWAY_FAKE_STEP_SECONDS": "0.02"}
LONG = {"model": "tiny", "prompt": [50, 51, 52], "max_tokens": 200, "stream": True}
SHORT = {"model": "tiny", "prompt": [50], "max_tokens": 2}


def health(server: RunningServer) -> httpx.Response:
    return httpx.get(f"{server.url}/health", timeout=10)


def wait_for_health(server: RunningServer, status: int, timeout_seconds: float = 20.0) -> httpx.Response:
    deadline = time.monotonic() + timeout_seconds
    while (response := health(server)).status_code != status:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.01)
    return response


def test_an_engine_that_hangs_fails_health_until_it_answers_again(start_server: StartServer) -> None:
    server = start_server("--engine-timeout-seconds=1", environment=SLOW)
    (engine,) = server.children()
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=LONG) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        stopped_at = time.monotonic()
        engine.suspend()
        failed = wait_for_health(server, 503)
        assert time.monotonic() - stopped_at > 0.9, "it was called dead before its time"
        assert failed.json()["error"]["code"] == "engine_stalled"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        refused = httpx.post(f"{server.url}/v1/completions", json=SHORT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "engine_stalled"
        assert "the engine has not answered for 1 s" in server.log
        engine.resume()
        wait_for_health(server, 200)
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=30).status_code == 200
        # Nothing was lost: the stream that it was in the middle of ends as it would have.
        assert [line for line in lines if line][-1] == "data: [DONE]"
    page = httpx.get(f"{server.url}/metrics").text
    assert 'headway_requests_rejected_total{reason="unavailable"} 1.0' in page, (
        "what came meanwhile is counted"
    )
    assert "headway_requests_received_total 3.0" in page


def test_a_server_whose_engine_hangs_can_still_be_ended(start_server: StartServer) -> None:
    server = start_server("--engine-timeout-seconds=1", "--drain-timeout-seconds=1")
    (engine,) = server.children()
    engine.suspend()
    wait_for_health(server, 503)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not psutil.pid_exists(engine.pid) or engine.status() == psutil.STATUS_ZOMBIE


def test_a_long_step_is_not_taken_for_a_hang(start_server: StartServer) -> None:
    server = start_server("--engine-timeout-seconds=4", environment={"HEADWAY_FAKE_STEP_SECONDS": "1.5"})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json={**SHORT, "max_tokens": 4}, timeout=60
        )
        while not answer.done():
            assert health(server).status_code == 200
            time.sleep(0.02)
        assert answer.result().status_code == 200


def test_an_idle_engine_is_not_taken_for_a_hang(start_server: StartServer) -> None:
    server = start_server("--engine-timeout-seconds=1")
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert health(server).status_code == 200
        time.sleep(0.05)


def test_a_server_that_was_frozen_as_a_whole_is_well_when_it_wakes(start_server: StartServer) -> None:
    server = start_server("--engine-timeout-seconds=1")
    processes = [psutil.Process(server.process.pid), *server.children()]
    for process in processes:
        process.suspend()
    time.sleep(2.0)  # what is tested is that this time does not count
    for process in processes:
        process.resume()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert health(server).status_code == 200
