"""Ranks as real processes under real servers: how they start, and that none ends or hangs unnoticed."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from headway_runtime.errors import ConfigError, DoesNotFitError, EngineDeadError
from headway_runtime.inprocess import Engine
from headway_runtime.parallel import leader
from headway_runtime.parallel.tensor_group import TensorGroup, open_group
from headway_runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.long
MODEL = "bundled://headway-tiny"
FLAGS = ["--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "8Mi", "--device", "cpu"]
# The time in which a dead rank must have ended the engine.
DEATH_SECONDS = 10.0
START_SECONDS = 120.0


@dataclass
class Served:
    """A `headway serve` process, and what it wrote."""

    process: subprocess.Popen[str]
    port_file: Path
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port_file.read_text().strip()}"

    def status(self, path: str) -> int | None:
        try:
            return httpx.get(f"{self.url}{path}", timeout=5).status_code
        except (httpx.HTTPError, OSError):
            return None

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        return self.port_file.exists() and self.status("/ready") == 200

    def complete(self, prompt: str, max_tokens: int = 8) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def ranks(self) -> list[psutil.Process]:
        """Processes above rank 0, of this server or node."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if "headway_runtime.parallel.worker" in " ".join(one.cmdline())]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """serve(*flags): a server, which ends with the test."""
    started: list[Served] = []
    threads = []

    def start(*flags: str) -> Served:
        port_file = tmp_path / f"port{len(started)}"
        command = [sys.executable, "-m", "headway", "serve", MODEL, *FLAGS, "--port", "0"]
        process = subprocess.Popen(
            [*command, "--port-file", str(port_file), *flags], stderr=subprocess.PIPE, text=True
        )
        one = Served(process, port_file)
        started.append(one)
        threads.append(threading.Thread(target=one.read))
        threads[-1].start()
        return one

    yield start
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(one.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        one.process.kill()
        one.process.wait()
    for thread in threads:
        thread.join(10)
    for one in started:
        assert one.process.stderr is not None
        one.process.stderr.close()


def test_a_killed_rank_ends_the_server_in_the_midst_of_work(serve: Any, wait_until: Any) -> None:
    server = serve("--tensor-parallel-size", "2")
    wait_until(server.is_ready, START_SECONDS)
    assert server.complete("Once upon a time") == server.complete("Once upon a time")
    (rank,) = server.ranks()
    page = httpx.get(f"{server.url}/metrics", timeout=5).text
    assert "headway_tensor_parallel_size 2.0" in page
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        began_at = time.monotonic()
        rank.send_signal(signal.SIGKILL)
        last = [line for line in events if line]
    assert any("engine_dead" in line for line in last)
    assert server.process.wait(DEATH_SECONDS) == 1
    assert time.monotonic() - began_at < DEATH_SECONDS
    wait_until(lambda: "this server ends" in server.log or "ended with status" in server.log, 5)
    assert f"rank 1 on node 0 (process {rank.pid}) was killed by SIGKILL" in server.log


def test_a_rank_that_is_killed_while_it_loads_ends_the_server(serve: Any, wait_until: Any) -> None:
    server = serve("--tensor-parallel-size", "2")
    wait_until(lambda: server.process.poll() is None and server.ranks(), START_SECONDS)
    (rank,) = server.ranks()
    assert server.status("/ready") != 200
    rank.send_signal(signal.SIGKILL)
    # Not before rank 0 has imported PyTorch: until then nobody waits for the rank.
    assert server.process.wait(START_SECONDS) == 1
    wait_until(lambda: f"rank 1 on node 0 (process {rank.pid}) was killed by SIGKILL" in server.log, 5)


def test_a_stopped_rank_ends_an_idle_server_and_is_not_left_behind(serve: Any, wait_until: Any) -> None:
    server = serve("--tensor-parallel-size", "2")
    wait_until(server.is_ready, START_SECONDS)
    (rank,) = server.ranks()
    rank.send_signal(signal.SIGSTOP)
    began_at = time.monotonic()
    assert server.process.wait(2 * DEATH_SECONDS) == 1
    assert time.monotonic() - began_at < DEATH_SECONDS
    wait_until(lambda: f"rank 1 on node 0 (process {rank.pid}) has not answered for 7 s" in server.log, 5)
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 5)


def test_ranks_end_with_a_server_that_is_killed_and_with_one_that_drains(serve: Any, wait_until: Any) -> None:
    servers = [serve("--tensor-parallel-size", "2") for _ in range(2)]
    for server in servers:
        wait_until(
            lambda server=server: server.port_file.exists() and server.status("/ready") == 200, START_SECONDS
        )
    ranks = [one for server in servers for one in server.ranks()]
    assert len(ranks) == 2
    # Even a rank that is stopped goes with its parent.
    ranks[0].send_signal(signal.SIGSTOP)
    servers[0].process.kill()
    servers[1].process.terminate()
    assert servers[1].process.wait(20) == 0
    for rank in ranks:
        wait_until(lambda rank=rank: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 10)
    assert "rank 0 is gone" not in servers[1].log


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def node(serve: Any, port: int, number: int, size: int, *flags: str) -> Served:
    server: Served = serve(
        *("--tensor-parallel-size", str(size), "--nnodes", "2", "--node-rank", str(number)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), *flags),
    )
    return server


def test_two_nodes_of_two_ranks_each(serve: Any, wait_until: Any) -> None:
    """Four ranks of two KV heads, which hold each of them twice; then a rank of the other node dies."""
    port = free_port()
    # In any order: node 1 waits for node 0.
    other = node(serve, port, 1, 4, "--headless")
    first = node(serve, port, 0, 4)
    wait_until(lambda: other.port_file.exists() and other.status("/health") == 200, START_SECONDS)
    assert other.status("/ready") == 503
    wait_until(first.is_ready, START_SECONDS)
    wait_until(lambda: other.status("/ready") == 200, 5)
    assert len(first.ranks()) == 1
    assert len(other.ranks()) == 2
    assert first.complete("Once upon a time", 16)
    answer = httpx.post(f"{other.url}/v1/completions", json={}, timeout=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_node_0")
    rank = other.ranks()[0]
    began_at = time.monotonic()
    rank.send_signal(signal.SIGKILL)
    assert first.process.wait(DEATH_SECONDS) == 1
    assert other.process.wait(DEATH_SECONDS) == 1
    assert time.monotonic() - began_at < DEATH_SECONDS
    wait_until(lambda: "on node 1 was killed by SIGKILL" in first.log, 5)


def test_a_drained_node_0_ends_the_others_in_order(serve: Any, wait_until: Any) -> None:
    port = free_port()
    first, other = node(serve, port, 0, 2), node(serve, port, 1, 2)
    wait_until(other.is_ready, START_SECONDS)
    # As a pod's end is: all are told at once. Node 1 goes on for as long as node 0 does.
    other.process.terminate()
    wait_until(lambda: "computing on until rank 0 ends" in other.log, 5)
    assert first.complete("Once upon a time")
    first.process.terminate()
    assert first.process.wait(20) == 0
    assert other.process.wait(10) == 0


def test_a_node_of_other_flags_is_refused_and_the_engine_goes_on_waiting(serve: Any, wait_until: Any) -> None:
    port = free_port()
    first = node(serve, port, 0, 2)
    wrong = node(serve, port, 1, 2, "--block-size", "32")
    assert wrong.process.wait(START_SECONDS) == 2
    wait_until(lambda: "its block_size is 32, node 0's 16" in wrong.log, 5)
    assert first.process.poll() is None
    right = node(serve, port, 1, 2)
    wait_until(right.is_ready, START_SECONDS)


def test_a_node_that_does_not_come_is_named(serve: Any, wait_until: Any) -> None:
    first = node(serve, free_port(), 0, 2, "--distributed-timeout-seconds", "0.5")
    assert first.process.wait(START_SECONDS) == 1
    wait_until(lambda: "ranks 1 on nodes 1 did not come within 0.5 s" in first.log, 5)
    alone = node(serve, free_port(), 1, 2, "--distributed-timeout-seconds", "0.5")
    assert alone.process.wait(START_SECONDS) == 1
    wait_until(lambda: "rank 0 does not listen on 127.0.0.1" in alone.log, 5)


def test_ranks_that_do_not_fit_end_their_server_with_that_status() -> None:
    """Whichever of the ranks is the first to say so."""
    flags = ["-tp", "2", "--port=0", "--device=cpu", f"--kv-cache-memory-bytes={2**50}"]
    command = [sys.executable, "-m", "headway", "serve", MODEL, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == DoesNotFitError.exit_status
    assert "kv_cache_memory_bytes=1125899906842624 is more than the" in done.stderr


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["-tp", "3"], "tensor_parallel_size=3: the model's num_attention_heads, 4, is no multiple of it"),
        (["-tp", "3", "--nnodes", "2"], "3 ranks cannot be shared out evenly among --nnodes=2"),
        (["-tp", "2", "--nnodes", "2", "--node-rank", "2"], "there are nodes 0 to 1"),
        (["-tp", "2", "--headless"], "give this one a --node-rank above 0"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags: list[str], want: str) -> None:
    command = [sys.executable, "-m", "headway", "serve", MODEL, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert want in done.stderr


def test_fewer_gpus_than_ranks_are_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from headway_runtime.config import ParallelConfig
    from headway_runtime.engine_config import _check_gpus

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    _check_gpus("cuda", ParallelConfig(size=2, num_nodes=2))
    with pytest.raises(ConfigError, match="2 GPUs are needed on each of 2 nodes, one for each rank"):
        _check_gpus("cuda", ParallelConfig(size=4, num_nodes=2))


@pytest.fixture(scope="module")
def plain_answers() -> list[str]:
    with Engine(MODEL, max_model_len=256, kv_cache_memory_bytes="8Mi", device="cpu") as engine:
        return texts(engine)


def texts(engine: Engine) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = engine.generate(["Once upon a time", "The answer is"], params, use_tqdm=False)
    return [one.outputs[0].text for one in outputs]


def test_an_engine_in_the_users_process(plain_answers: list[str], children: Any, wait_until: Any) -> None:
    """The same answers; and a rank that dies ends the engine, not the user's process."""
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": "8Mi", "device": "cpu"}
    with Engine(MODEL, tensor_parallel_size=2, **options) as engine:
        assert texts(engine) == plain_answers
        (rank,) = children()
        rank.send_signal(signal.SIGSTOP)
        began_at = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 on node 0 .* has not answered for 7 s"):
            engine.generate(["Once"], SamplingParams(max_tokens=100), use_tqdm=False)
        assert time.monotonic() - began_at < DEATH_SECONDS
        # Everything later is told the same.
        with pytest.raises(EngineDeadError, match="rank 1 on node 0"):
            engine.generate(["Once"], use_tqdm=False)
    wait_until(lambda: not children(), 5)
    with pytest.raises(ConfigError, match="node_rank=1: an Engine in a process is node 0's"):
        Engine(MODEL, tensor_parallel_size=2, nnodes=2, node_rank=1)


class AsOnDevice:
    """Tensors between ranks as a GPU has them: who waits for a lost rank's waits until the group is aborted,
    and then goes on without an error, with numbers that nobody has computed."""

    def __init__(self, processes: Any) -> None:
        self._processes = processes
        self.was_aborted = threading.Event()

    def allreduce(self, tensors: list[Any]) -> Any:
        return self._work(tensors, self._processes.allreduce, tensors)

    def gather(self, parts: list[list[Any]], tensors: list[Any], options: object) -> Any:
        return self._work(parts[0], self._processes.gather, parts, tensors, options)

    def _work(self, results: list[Any], begin: Callable[..., Any], *arguments: object) -> Any:
        def wait() -> None:
            try:
                begin(*arguments).wait()
            except RuntimeError:
                assert self.was_aborted.wait(START_SECONDS)
                for one in results:
                    one.uniform_(-1.0, 1.0)

        return SimpleNamespace(wait=wait)

    def allgather(self, parts: list[list[Any]], tensors: list[Any]) -> Any:
        raise AssertionError("what GPUs alone are asked for")

    def broadcast(self, tensors: list[Any], options: Any) -> Any:
        return self._work(tensors, self._processes.broadcast, tensors, options)

    def abort(self) -> None:
        self.was_aborted.set()


async def test_who_waits_on_a_device_for_a_lost_rank_is_let_go_and_hears_no_nonsense(
    children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[AsOnDevice] = []

    def open_as_on_device(*arguments: Any) -> TensorGroup:
        plain = open_group(*arguments)
        groups.append(AsOnDevice(plain._processes))
        return TensorGroup(plain.share, groups[0])

    monkeypatch.setattr(leader, "open_group", open_as_on_device)
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": "8Mi", "device": "cpu"}
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with Engine(MODEL, tensor_parallel_size=2, dtype="float32", num_threads=1, **options) as engine:
        (whole,) = engine.generate(["Once"], params, use_tqdm=False)
        heard: tuple[int, ...] = ()
        began_at = 0.0

        async def listen() -> None:
            nonlocal heard, began_at
            async for output in engine.generate_async("Once", params):
                heard = output.outputs[0].token_ids
                if not began_at:
                    began_at = time.monotonic()
                    children()[0].send_signal(signal.SIGKILL)

        with pytest.raises(EngineDeadError, match=r"rank 1 on node 0 .* was killed by SIGKILL"):
            await listen()
        assert time.monotonic() - began_at < DEATH_SECONDS
        assert 0 < len(heard) < 200
        assert whole.outputs[0].token_ids[: len(heard)] == heard
        # Whose requests end hears of it before the device does.
        assert groups[0].was_aborted.wait(DEATH_SECONDS)


def test_a_rank_that_cannot_load_says_why(tmp_path: Path, children: Any) -> None:
    """Here rank 0 cannot either; whoever speaks first, it is told, and nobody is left."""
    import shutil

    from headway_runtime.errors import HeadwayRuntimeError
    from headway_runtime.sources import resolve

    folder = tmp_path / "model"
    shutil.copytree(resolve(MODEL), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))
    with pytest.raises(HeadwayRuntimeError, match="is in no file of the checkpoint"):
        Engine(str(folder), tensor_parallel_size=2, device="cpu", max_model_len=64)
    assert not children()
