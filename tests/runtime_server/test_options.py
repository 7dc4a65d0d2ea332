"""The command line: what it resolves to, and one clear line for what is wrong with it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from headway_runtime.config import Envelope, Limits
from headway_runtime.cpus import usable_cpus
from headway_runtime.errors import ConfigError, DoesNotFitError, HeadwayRuntimeError
from headway_runtime.server.http_options import HttpOptions
from headway_runtime.server.options import ServeOptions, parse_options

if TYPE_CHECKING:
    from pathlib import Path


def parse(model_folder: Path, *arguments: str, **environment: str) -> ServeOptions:
    return parse_options([str(model_folder), *arguments], environment)


def test_defaults_are_the_documented_ones(model_folder: Path) -> None:
    options = parse(model_folder)
    engine = options.engine
    assert (options.host, options.port, options.log_level) == ("127.0.0.1", 8000, "info")
    assert options.served_model_names == (str(model_folder),)
    assert engine.limits == Limits(64, 2048)
    assert (engine.max_model_len, engine.block_size, engine.max_waiting) == (512, 16, 1024)
    assert (engine.device, engine.dtype, engine.load_format) == ("auto", "auto", "auto")
    assert engine.kv_cache_memory_bytes is None
    assert engine.num_threads >= 1
    assert options.http == HttpOptions(
        api_server_count=1,
        max_connections=8192,
        max_header_bytes=64 * 2**10,
        max_header_count=256,
        header_timeout_seconds=15.0,
        max_body_bytes=16 * 2**20,
        body_timeout_seconds=60.0,
        keep_alive_seconds=75.0,
        engine_timeout_seconds=180.0,
    )


def test_limits_go_by_the_names_of_vllm_and_uvicorn_too(model_folder: Path) -> None:
    theirs = parse(
        model_folder,
        "--h11-max-incomplete-event-size=32768",
        "--h11-max-header-count=50",
        "--limit-concurrency=100",
        "--timeout-keep-alive=5",
        "--api-server-count=4",
    ).http
    ours = parse(
        model_folder,
        "--max-header-bytes=32Ki",
        "--max-header-count=50",
        "--max-connections=100",
        "--timeout-keep-alive=5",
        "--api-server-count=4",
    ).http
    assert theirs == ours
    assert (ours.max_header_bytes, ours.max_connections, ours.api_server_count) == (32768, 100, 4)


def test_names_and_keys_come_several_at_once_or_one_by_one(model_folder: Path) -> None:
    options = parse(
        model_folder, "--served-model-name", "a", "b", "--served-model-name=c", "--api-key", "d", "e"
    )
    assert options.served_model_names == ("a", "b", "c")
    assert options.api_keys == ("d", "e")


def test_initial_limits_lie_inside_the_envelope(model_folder: Path) -> None:
    options = parse(
        model_folder, "--max-num-seqs=8", "--initial-max-num-seqs=2", "--initial-max-num-batched-tokens=16"
    )
    assert options.engine.limits == Limits(2, 16)
    assert options.engine.envelope.max_num_seqs == 8


@pytest.mark.parametrize(
    ("text", "want"),
    [("1048576", 2**20), ("512Mi", 2**29), ("512MiB", 2**29), ("4G", 4 * 10**9), ("1.5 GiB", 3 * 2**29)],
)
def test_sizes_are_written_as_kubernetes_does(model_folder: Path, text: str, want: int) -> None:
    assert parse(model_folder, f"--kv-cache-memory-bytes={text}").engine.kv_cache_memory_bytes == want


def test_api_keys_come_from_flags_file_and_environment(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# Anna's\nc\n\n  # Ben's\r\nd#1\r\n", encoding="utf-8-sig")
    options = parse(model_folder, "--api-key=a", "--api-key=a", f"--api-key-file={path}", HEADWAY_API_KEY="b")
    assert options.api_keys == ("a", "b", "c", "d#1")
    both = parse(model_folder, VLLM_API_KEY="v", HEADWAY_API_KEY="b")
    assert both.api_keys == ("b", "v")


@pytest.mark.parametrize(("text", "want"), [("300", 300), ("0.3k", 300), ("0.5k", 500)])
def test_lengths_are_written_as_vllm_does(model_folder: Path, text: str, want: int) -> None:
    assert parse(model_folder, f"--max-model-len={text}").engine.max_model_len == want
    batched = parse(model_folder, "--max-num-batched-tokens=8K").engine.envelope.max_num_batched_tokens
    assert (batched, parse(model_folder, "--max-num-batched-tokens=8k").engine.envelope) == (
        8192,
        Envelope(64, 8000, 0),
    )


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--port=70000"], "--port"),
        (["--port=x"], "'x' is not an integer"),
        (["--max-num-seqs=0"], "--max-num-seqs"),
        (["--max-num-seqs=64", "--initial-max-num-seqs=65"], "--initial-max-num-seqs"),
        (["--max-num-seqs=9", "--max-num-batched-tokens=8"], "--max-num-batched-tokens"),
        (["--max-model-len=1.5K"], "'1.5K' is not an integer"),
        (["--max-model-len=1K"], "is more than the model's"),
        (["--max-logprobs=-2"], "at least -1"),
        (["--max-model-len=513"], "max_position_embeddings, 512"),
        (["--kv-cache-memory-bytes=5X"], "'5X' is not a size"),
        (["--kv-cache-memory-bytes=0"], "at least 1 byte"),
        (["--kv-cache-dtype=fp4"], "--kv-cache-dtype"),
        (["--drain-timeout-seconds=0"], "above 0"),
        (["--api-server-count=0"], "--api-server-count"),
        (["--max-body-bytes=0"], "at least 1 byte"),
        (["--engine-timeout-seconds=-1"], "above 0"),
        (["--ttft-target-milliseconds=inf"], "above 0"),
        (["--device=tpu"], "--device"),
        (["--api-key="], "--api-key"),
        (["--api-key-file=/nonexistent"], "--api-key-file"),
        (["--admin-audience=a/b"], "--admin-public-key-file"),
        (["--admin-public-key-file=x", "--admin-audience=ab"], "NAMESPACE/NAME"),
        (["--max-num-seq=3"], "--max-num-seq"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_wrong_flag_is_named(model_folder: Path, arguments: list[str], want: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model_folder, *arguments)
    assert want in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_api_key_file_without_keys_does_not_open_the_server(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\n \n# to come\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no key"):
        parse(model_folder, f"--api-key-file={path}")


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    for source in ("gs://bucket/nothing", str(tmp_path / "nothing"), "bundled://nothing"):
        with pytest.raises(HeadwayRuntimeError, match="nothing"):
            parse_options([source], {})


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headway", "serve", *arguments], capture_output=True, text=True, timeout=120
    )


def test_a_wrong_flag_is_one_line_and_status_2(model_folder: Path) -> None:
    ended = serve(str(model_folder), "--port=-1")
    assert (ended.returncode, ended.stdout) == (2, "")
    want = "argument --port: '-1' is out of range; give from 0 to 65535; see `headway serve --help`"
    assert ended.stderr.splitlines() == [f"headway serve: {want}"]


def test_a_port_in_use_is_one_line_and_status_2(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = serve(str(model_folder), f"--port={port}", "--load-format=dummy")
    assert ended.returncode == 2
    assert f"--port={port}: cannot listen" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_model_that_the_memory_cannot_hold_is_status_4_and_the_arithmetic(
    model_folder: Path, fronts: int
) -> None:
    """The engine process finds out; the server hands on its status, by which a supervisor knows."""
    flags = ("--port=0", "--device=cpu", "--load-format=dummy", f"--kv-cache-memory-bytes={2**50}")
    ended = serve(str(model_folder), *flags, f"--api-server-count={fronts}")
    assert ended.returncode == DoesNotFitError.exit_status
    assert "headway serve: kv_cache_memory_bytes=1125899906842624 is more than the" in ended.stderr
    assert "lower --kv-cache-memory-bytes, to no less than" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_cannot_be_loaded_ends_both_processes(model_folder: Path, tmp_path: Path) -> None:
    """Only the engine process finds out, and its words are the only ones."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model_folder / file).read_bytes())
    ended = serve(str(tmp_path), "--port=0", "--device=cpu")
    assert ended.returncode != 0
    assert "safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_threads_follow_the_cgroups_cpu_limit(tmp_path: Path) -> None:
    everything = usable_cpus(tmp_path)
    assert everything >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n", encoding="ascii")
    assert usable_cpus(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    assert usable_cpus(tmp_path) == min(2, everything)
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert usable_cpus(tmp_path) == everything
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n", encoding="ascii")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    assert usable_cpus(tmp_path) == everything
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("10000\n", encoding="ascii")
    assert usable_cpus(tmp_path) == 1


def test_the_http_process_imports_neither_torch_nor_transformers() -> None:
    """And before the engine process is started, next to nothing is imported."""
    program = (
        "import sys, json; import headway_runtime.server.serve, headway_runtime.server.supervisor; "
        "before = set(sys.modules); "
        "import headway_runtime.server.http_process; print(json.dumps([sorted(before), sorted(sys.modules)]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = (set(names) for names in json.loads(ended.stdout))
    assert not after & {"torch", "transformers", "numpy", "triton", "safetensors"}
    assert not before & {"fastapi", "pydantic", "starlette", "uvicorn", "asyncio", "zmq", "tokenizers", "jwt"}
    assert {"fastapi", "uvicorn", "zmq"} <= after
