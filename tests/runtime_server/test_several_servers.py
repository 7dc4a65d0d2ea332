"""Several HTTP processes in front of one engine process: what they share, and what happens when one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
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


def processes_of(server: RunningServer) -> tuple[psutil.Process, list[psutil.Process]]:
    """The engine process and the HTTP processes."""
    fronts: list[psutil.Process] = []
    engines: list[psutil.Process] = []
    for child in server.children():
        (fronts if "front_process" in " ".join(child.cmdline()) else engines).append(child)
    (engine,) = engines
    return engine, fronts


def has_ended(process: psutil.Process, timeout_seconds: float = 10.0) -> bool:
    try:
        process.wait(timeout_seconds)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def connection_to(server: RunningServer, front: psutil.Process) -> httpx.Client:
    """A client whose one connection that HTTP process has accepted."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        client = httpx.Client(timeout=30, base_url=server.url)
        response = client.get("/health")
        assert response.status_code == 200
        local = response.extensions["network_stream"].get_extra_info("client_addr")
        theirs = {one.raddr.port for one in front.net_connections("tcp") if one.raddr}
        if local[1] in theirs:
            return client
        client.close()
    raise AssertionError(f"no connection reached process {front.pid}")


class Stream:
    """One streamed completion that has begun."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self.response = client.send(client.build_request("POST", "/v1/completions", json=body), stream=True)
        self._lines = self.response.iter_lines()
        assert next(self._lines)

    def rest(self) -> list[str]:
        """All further events, without their prefix."""
        return [line.removeprefix("data: ") for line in self._lines if line]


@pytest.fixture(scope="module")
def two_fronts(start_shared_server: StartServer) -> RunningServer:
    return start_shared_server("--api-server-count=2", environment=SLOW)


@pytest.fixture
def both(two_fronts: RunningServer) -> Iterator[list[httpx.Client]]:
    """One client at each HTTP process."""
    _, fronts = processes_of(two_fronts)
    clients = [connection_to(two_fronts, front) for front in fronts]
    yield clients
    for client in clients:
        client.close()


def test_the_kernel_shares_connections_among_all(two_fronts: RunningServer) -> None:
    _, fronts = processes_of(two_fronts)
    assert len(fronts) == 2
    for front in fronts:
        connection_to(two_fronts, front).close()


def test_each_is_answered_with_its_own_requests(two_fronts: RunningServer, both: list[httpx.Client]) -> None:
    def ask(number: int) -> Any:
        prompt = [60 + number, 80 + number]
        body = {**SHORT, "prompt": prompt, "max_tokens": 6, "return_token_ids": True}
        answer = both[number % 2].post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return prompt, answer.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        for prompt, got in pool.map(ask, range(16)):
            assert got == prompt * 3


def test_numbers_and_limits_are_the_same_whoever_is_asked(
    two_fronts: RunningServer, both: list[httpx.Client]
) -> None:
    def sample(client: httpx.Client) -> Any:
        headers = {"Authorization": f"Bearer {two_fronts.admin_token()}"}
        return client.get("/admin/sample", headers=headers).json()

    def received(client: httpx.Client) -> float:
        for line in client.get("/metrics").text.splitlines():
            if line.startswith("headway_requests_received_total "):
                return float(line.split()[1])
        raise AssertionError("no such line")

    before = [sample(client) for client in both]
    assert before[0]["instance"] == before[1]["instance"]
    for client in both:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
    for client in both:
        # A refusal that never reached the engine is counted there, too, by whichever process made it.
        assert client.post("/v1/completions", json={**SHORT, "max_tokens": 0}).status_code == 400
    deadline = time.monotonic() + 15
    want = before[0]["counters"]["received"] + 4
    while [sample(client)["counters"]["received"] for client in both] != [want, want]:
        assert time.monotonic() < deadline
    assert [received(client) for client in both] == [want, want]
    for number, client in enumerate(both):
        headers = {"Authorization": f"Bearer {two_fronts.admin_token()}"}
        patch = client.patch("/admin/limits", headers=headers, json={"max_num_seqs": 10 + number})
        assert patch.status_code == 200, patch.text
        assert [sample(one)["limits"]["max_num_seqs"] for one in both] == [10 + number] * 2


def test_one_that_dies_is_started_again_and_the_other_streams_go_on(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2", environment=SLOW)
    engine, (first, second) = processes_of(server)
    with closing(connection_to(server, first)) as doomed, closing(connection_to(server, second)) as spared:
        broken, whole = Stream(doomed, LONG), Stream(spared, LONG)
        first.kill()
        # Whoever comes now is served, by the other one or as soon as there is a successor.
        with ThreadPoolExecutor(12) as pool:
            late = [
                pool.submit(httpx.post, f"{server.url}/v1/completions", json=SHORT, timeout=60)
                for _ in range(12)
            ]
            assert [answer.result().status_code for answer in late] == [200] * 12
        with pytest.raises(httpx.TransportError):
            broken.rest()
        # The requests of the dead one are dropped when its successor takes its place, the others are not.
        freed = server.sample_until(lambda sample: sample["counters"]["aborted"] == 1)
        assert freed["gauges"]["running"] == 1
        assert whole.rest()[-1] == "[DONE]"
    _, fronts = processes_of(server)
    assert len(fronts) == 2
    assert first.pid not in {one.pid for one in fronts}
    for front in fronts:
        with closing(connection_to(server, front)) as client:
            assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert f"ended with status {-signal.SIGKILL}; it is started again" in server.log
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert has_ended(engine)


def test_a_server_whose_http_processes_keep_dying_ends(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2")
    deadline = time.monotonic() + 60
    while server.process.poll() is None:
        assert time.monotonic() < deadline
        with suppress(psutil.NoSuchProcess):
            for child in server.children():
                if "front_process" in " ".join(child.cmdline()):
                    child.kill()
        time.sleep(0.05)
    assert server.wait() == 1


def test_a_drain_waits_for_the_streams_of_all(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2", environment=SLOW)
    engine, fronts = processes_of(server)
    clients = [connection_to(server, front) for front in fronts]
    streams = [Stream(client, {**LONG, "max_tokens": 80}) for client in clients]
    server.signal(signal.SIGTERM)
    for stream in streams:
        assert stream.rest()[-1] == "[DONE]"
    for client in clients:
        client.close()
    assert server.wait() == 0
    assert all(has_ended(process) for process in (engine, *fronts))


def test_a_second_signal_ends_all_at_once(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2", environment=SLOW)
    _, fronts = processes_of(server)
    children = server.children()
    with closing(connection_to(server, fronts[0])) as client:
        stream = Stream(client, LONG)
        server.signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/ready", timeout=5).status_code == 200:
            pass
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 1
        stream.response.close()
    assert all(has_ended(process) for process in children)


def test_an_engine_that_dies_fails_the_requests_of_all(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2", environment=SLOW)
    engine, fronts = processes_of(server)
    clients = [connection_to(server, front) for front in fronts]
    streams = [Stream(client, LONG) for client in clients]
    died_at = time.monotonic()
    engine.kill()
    for stream in streams:
        assert json.loads(stream.rest()[-1])["error"]["code"] == "engine_dead"
    assert time.monotonic() - died_at < 1.0
    for client in clients:
        client.close()
    assert server.wait() == 1
    assert all(has_ended(process) for process in fronts)


def test_a_parent_that_is_killed_leaves_no_process_and_no_file(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2", environment=SLOW)
    children = server.children()
    engine, _ = processes_of(server)
    directory = json.loads(engine.cmdline()[-1])["directory"]
    server.process.kill()
    server.wait()
    assert len(children) == 3
    assert all(has_ended(process) for process in children)
    deadline = time.monotonic() + 10
    while os.path.exists(directory):
        assert time.monotonic() < deadline


def test_a_port_that_another_server_has_is_not_shared_with_it(
    two_fronts: RunningServer, tmp_path: Path
) -> None:
    command = [*psutil.Process(two_fronts.process.pid).cmdline(), f"--port={two_fronts.port}"]
    command = [one for one in command if not one.startswith(("--lifeline", "--port-file"))]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert b"cannot listen there" in ended.stderr


def test_keys_are_on_no_command_line(start_server: StartServer) -> None:
    server = start_server("--api-server-count=2", environment={"HEADWAY_API_KEY": "a-secret"}, ready=True)
    assert httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code == 401
    headers = {"Authorization": "Bearer a-secret"}
    assert httpx.post(f"{server.url}/v1/completions", json=SHORT, headers=headers).status_code == 200
    for child in server.children():
        assert "a-secret" not in " ".join(child.cmdline())
