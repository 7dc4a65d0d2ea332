"""Models small enough for a test, a Hub that speaks the real one's HTTP, and real servers of the others."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sources.hub_model import MODEL, Fetch
from tests.sources.misbehaving_servers import Cut, Fault, Hub, Proxy, TokenRegistry

from headway_runtime.sources import BUNDLED_FOLDER
from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_process import check_config
from headway_runtime.sources.hub import Hub as HubClient
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import HubModel
from headway_runtime.sources.store import Store

CHECKOUT = Path(__file__).parents[2]
BUILD_TIMEOUT_SECONDS = 1800
# The login `reader` with the password `secret`, as htpasswd writes it with bcrypt.
PASSWORD_FILE = "reader:$2a$05$pFcG6c4Nw/A4cFRRlHCueud/57/hwuTZNr/ZIy2lg/EBKfUJpE9ii\n"
ACCESS_KEY, SECRET_KEY = "AKIATEST", "a-secret-of-the-test"


def model_files(num_shards: int = 3, shard_bytes: int = 3_000_000) -> dict[str, bytes]:
    """A sharded model, with weights that nobody loads, and what else repositories have."""
    bundled = BUNDLED_FOLDER / "headway-tiny"
    names = [f"model-{i:05}-of-{num_shards:05}.safetensors" for i in range(1, num_shards + 1)]
    index = {"weight_map": {f"tensor.{number}": name for number, name in enumerate(names)}}
    files = {name: (bundled / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    files |= {"tokenizer_config.json": b'{"chat_template": "x"}', "chat_template.jinja": b"{{ messages }}"}
    files |= {"model.safetensors.index.json": json.dumps(index).encode()}
    files |= {name: os.urandom(shard_bytes) for name in names}
    return files | UNWANTED


UNWANTED = {
    "modeling_evil.py": b"raise SystemExit('code of a repository was run')",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the same weights again",
    "README.md": b"# A model",
    "training_args.bin": b"a pickle too",
}


def safetensors_files(shard_bytes: int = 3_000_000) -> dict[str, bytes]:
    """The same in two shards, whose headers are what safetensors' are; of no layer that a model has."""
    files = model_files(2, 0)
    for number, name in enumerate(sorted(one for one in files if one.startswith("model-0"))):
        row = {"dtype": "BF16", "shape": [shard_bytes // 2], "data_offsets": [0, shard_bytes]}
        header = json.dumps({f"tensor.{number}": row}).encode()
        files[name] = struct.pack("<Q", len(header)) + header + os.urandom(shard_bytes)
    return files


def wanted_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name not in UNWANTED}


class Watcher:
    """Counts what is told."""

    def __init__(self) -> None:
        self.expected = self.arrived_bytes = self.there_bytes = self.files = 0
        self._lock = threading.Lock()

    def there(self, num_bytes: int) -> None:
        self.there_bytes += num_bytes

    def expect(self, num_bytes: int, num_files: int) -> None:
        self.expected += num_bytes

    def arrived(self, num_bytes: int) -> None:
        with self._lock:
            self.arrived_bytes += num_bytes

    def file_done(self) -> None:
        with self._lock:
            self.files += 1


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cache, login or setting of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGINGFACE_", "AWS_", "HEADWAY_", "DOCKER_", "REGISTRY_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def impatient() -> Patience:
    """Tries as often as the real one, without its pauses; `Patience.sleep` is where a test looks at them."""
    return Patience(num_tries=4, sleep=lambda seconds: None)


Headway = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def headway(hub: Hub) -> Headway:
    """Run the command, with that Hub as the Hub."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headway", *arguments],
            env={**os.environ, "HF_ENDPOINT": hub.url, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def _built(name: str) -> Path:
    """A real server: compiled once into the cache, in a minute or two where it is not there."""
    answer = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "build", name],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return Path(answer.stdout.splitlines()[-1].split("\t")[1])


@pytest.fixture(scope="session")
def registry_program() -> Path:
    return _built("registry")


@pytest.fixture(scope="session")
def s3_program() -> Path:
    return _built("s3server")


@contextmanager
def running_registry(program: Path, folder: Path, passwords: Path | None = None) -> Iterator[str]:
    """The address of a registry of the distribution project that keeps its blobs in `folder`."""
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
    }
    if passwords is not None:
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(passwords)}}
    process = subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            process.stdin.write(json.dumps(config).encode())
            process.stdin.close()
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()
            process.wait()


@contextmanager
def running_s3(program: Path, folder: Path) -> Iterator[str]:
    """The address of an S3 server over `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [program, folder, f"127.0.0.1:{port}"],
        env={"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except ConnectionRefusedError:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.02)


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture
def cut() -> type[Cut]:
    return Cut


@pytest.fixture
def proxy() -> Iterator[Callable[[str], Proxy]]:
    """Makes proxies of a server's address."""
    made: list[Proxy] = []

    def make(address: str) -> Proxy:
        host, _, port = address.removeprefix("http://").partition(":")
        made.append(Proxy((host, int(port))))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def make_files() -> Callable[..., dict[str, bytes]]:
    return model_files


@pytest.fixture
def make_safetensors() -> Callable[..., dict[str, bytes]]:
    return safetensors_files


@pytest.fixture
def tiny() -> dict[str, bytes]:
    """A model that can be served: the bundled one."""
    return {path.name: path.read_bytes() for path in (BUNDLED_FOLDER / "headway-tiny").iterdir()}


@pytest.fixture
def holds() -> Callable[[Path, dict[str, bytes]], None]:
    """Check that a folder holds what is wanted of `files`, and nothing else."""

    def check(folder: Path, files: dict[str, bytes]) -> None:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted_of(files)

    return check


@pytest.fixture(scope="session")
def s3_server(s3_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_s3(s3_program, tmp_path_factory.mktemp("s3")) as address:
        yield address


@pytest.fixture(scope="session")
def registry_server(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(registry_program, tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def closed_registry(registry_program: Path, tmp_path: Path) -> Iterator[str]:
    """One that wants the login `reader` with the password `secret`."""
    passwords = tmp_path / "passwords"
    passwords.write_text(PASSWORD_FILE)
    with running_registry(registry_program, tmp_path / "registry", passwords) as address:
        yield address


@pytest.fixture
def token_registry() -> Iterator[TokenRegistry]:
    server = TokenRegistry()
    yield server
    server.close()


@pytest.fixture
def adapter_files() -> dict[str, bytes]:
    """A LoRA adapter's, as PEFT saves it."""
    return {
        "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 4}).encode(),
        "adapter_model.safetensors": os.urandom(100_000),
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(MODEL, None, {"HF_HOME": str(tmp_path / "hf")})


@pytest.fixture
def fetched(hub: Any, store: Store, impatient: Patience, watcher: Any) -> Fetch:
    def run(model: HubModel = MODEL, patience: Patience = impatient, into: Store = store) -> Path:
        return fetch(model, HubClient(model, hub.url), into, patience, watcher, check_config)

    return run
