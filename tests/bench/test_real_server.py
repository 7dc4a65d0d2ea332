"""The benchmark against the real engine and its bundled model."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import pytest

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench

START_TIMEOUT_SECONDS = 120.0


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    port_file, log_path = folder / "port", folder / "log"
    flags = ["--port=0", f"--port-file={port_file}", "--device=cpu", "--num-threads=1"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", "serve", "bundled://headway-tiny", *flags],
            stdout=log,
            stderr=log,
        )
    try:
        yield _ready(process, port_file, log_path)
    finally:
        process.terminate()
        process.wait(60)


def _ready(process: "subprocess.Popen[bytes]", port_file: Path, log_path: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        assert process.poll() is None, log_path.read_text()
        assert time.monotonic() < deadline, log_path.read_text()
        if port_file.exists():
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
            try:
                with urlopen(f"{url}/ready", timeout=5) as response:
                    assert response.status == 200
                return url
            except (URLError, OSError):
                pass
        time.sleep(0.05)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_lengths_are_exact_and_every_request_is_answered(
    run_bench: "RunBench", real_url: str, endpoint: str
) -> None:
    flags = ("--concurrency", "4", "--num-requests", "12", "--warmup-requests", "2", "--ignore-eos")
    lengths = ("--input-length", "uniform:20:90", "--output-length", "uniform:3:12")
    done = run_bench(*flags, *lengths, "--endpoint", endpoint, "--fail-on-error", url=real_url)
    assert done.status == 0
    tokens = done.summary["tokens"]
    assert tokens["input_as_wanted"]["value"] == 1
    assert tokens["output_as_wanted"]["value"] == 1
    assert done.summary["num_completed"] == 12
    assert done.report["conditions"]["prompt_lengths"] == "server"
    assert done.report["conditions"]["server"]["version"]
    assert done.summary["latency_milliseconds"]["ttft"]["count"] == 12


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_whole_answers_are_first_seen_at_their_end(
    run_bench: "RunBench", real_url: str, endpoint: str
) -> None:
    flags = ("--no-stream", "--num-requests", "6", "--input-length=32", "--output-length=12", "--ignore-eos")
    done = run_bench(*flags, "--endpoint", endpoint, "--turns", "2", "--fail-on-error", url=real_url)
    assert done.status == 0
    assert done.report["workload"]["stream"] is False
    assert {request["output_tokens"] for request in done.requests} == {12}
    assert all(request["cached_tokens"] is not None for request in done.requests)
    latency = done.summary["latency_milliseconds"]
    assert latency["ttft"]["count"] == latency["e2e"]["count"] == 6
    assert latency["tpot"] is None
    for request in done.requests:
        assert request["event_times"] == [request["ended"]]


def test_token_ids_and_an_open_loop(run_bench: "RunBench", real_url: str) -> None:
    flags = ("--endpoint", "completions", "--prompt-lengths", "ids", "--request-rate", "40")
    done = run_bench(
        *flags, "--num-requests", "16", "--input-length=64", "--output-length=8", "--ignore-eos", url=real_url
    )
    assert {request["input_tokens"] for request in done.requests} == {64}
    assert {request["output_tokens"] for request in done.requests} == {8}
    assert done.summary["num_failed"] == 0


def test_a_conversation_is_continued_with_the_models_answers(run_bench: "RunBench", real_url: str) -> None:
    done = run_bench(
        "--num-requests", "3", "--turns", "3", "--output-length", "8", "--ignore-eos", url=real_url
    )
    lengths = [request["input_tokens"] for request in done.requests]
    assert lengths[0] == 128
    assert lengths[1] > lengths[0] + 128
    assert lengths[2] > lengths[1] + 128
