"""Models small enough for a test, a Hub that speaks the real one's HTTP, and real servers of the others."""

import base64
import hashlib
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
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from headway_runtime.sources import BUNDLED_FOLDER
from headway_runtime.sources.patience import Patience

CHECKOUT = Path(__file__).parents[2]
BUILD_TIMEOUT_SECONDS = 1800
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD_TOKEN = "hf_good"
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


@dataclass
class Fault:
    """What a server does in place of a good answer, once. after: bytes of the body that still come."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = None
    stall: bool = False
    damage: bool = False
    ignores_range: bool = False
    body: bytes = b"{}"


@dataclass(frozen=True)
class Asked:
    """A request as a server saw it."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


class Server:
    """An HTTP server on a thread. Subclasses answer; `faults` are used up, by the end of the path."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.faults: dict[str, list[Fault]] = {}
        self.released = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(unquote(parts.path), parse_qs(parts.query), headers)
                owner.asked.append(asked)
                owner.answer(self, asked)

            do_HEAD = do_GET  # noqa: N815 - likewise

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - likewise
                """Nothing."""

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            # Clients that give up, which is what many tests are about, are no error of the server.
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Nothing."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        raise NotImplementedError

    def fault_of(self, path: str) -> Fault | None:
        for end, faults in self.faults.items():
            if faults and path.endswith(end):
                return faults.pop(0)
        return None

    def send(
        self,
        handler: BaseHTTPRequestHandler,
        content: bytes,
        headers: dict[str, str] | None = None,
        status: int = 200,
        fault: Fault | None = None,
    ) -> None:
        """A body, from where the request's Range says, with what a fault does to it."""
        fault = fault or Fault()
        if fault.status is not None:
            status, content, headers = fault.status, fault.body, fault.headers
        headers = dict(headers or {})
        ranged = handler.headers.get("Range", "")
        if status == 200 and ranged.startswith("bytes=") and not fault.ignores_range:
            start = int(ranged.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        if fault.damage:
            content = bytes([content[0] ^ 1]) + content[1:]
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if fault.after is None:
            handler.wfile.write(content)
            return
        handler.wfile.write(content[: fault.after])
        handler.wfile.flush()
        if fault.stall:
            self.released.wait(60)
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)


class Storage(Server):
    """Where the Hub keeps large files: another host, which must never see a token."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs: dict[str, bytes] = {}

    def answer(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        content = self.blobs.get(asked.path.removeprefix("/"))
        if "authorization" in asked.headers or content is None or asked.query.get("signature") != ["good"]:
            self.send(handler, b"", status=400)
            return
        self.send(handler, content, {"ETag": '"of-the-storage"'}, fault=self.fault_of(asked.path))


class Hub(Server):
    """Repositories as the Hub serves them: its API, `resolve` addresses, redirects to a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage()
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.revisions = {"main": COMMIT, COMMIT: COMMIT}
        self.private: set[str] = set()
        self.gated: set[str] = set()

    def close(self) -> None:
        self.storage.close()
        super().close()

    def add(self, name: str, files: dict[str, bytes]) -> None:
        self.repositories[name] = files
        self.storage.blobs |= {
            hashlib.sha256(content).hexdigest(): content for path, content in files.items() if is_lfs(path)
        }

    def answer(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        fault = self.fault_of(asked.path)
        parts = asked.path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        org, name, *rest = parts[2:] if is_api else parts
        repository = f"{org}/{name}"
        has_token = asked.headers.get("authorization") == f"Bearer {GOOD_TOKEN}"
        is_hidden = repository in self.private and not has_token
        if fault is not None and fault.status is not None:
            self.send(handler, b"", fault=fault)
        elif repository not in self.repositories or is_hidden:
            self.send(handler, b'{"error": "Invalid username or password."}', status=401)
        elif rest[:1] not in (["revision"], ["resolve"]) or rest[1] not in self.revisions:
            self.refuse(handler, 404, "RevisionNotFound")
        elif is_api:
            self.send(handler, self._listing(repository, self.revisions[rest[1]]), fault=fault)
        elif repository in self.gated and not has_token:
            self.refuse(handler, 403, "GatedRepo")
        else:
            self._file(handler, repository, self.revisions[rest[1]], "/".join(rest[2:]), fault)

    def refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.send(handler, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": "no"}, status)

    def _listing(self, repository: str, commit: str) -> bytes:
        siblings = []
        for path, content in self.repositories[repository].items():
            row: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git_sha1(content)}
            if is_lfs(path):
                sha256 = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 133}
            siblings.append(row)
        return json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()

    def _file(
        self, handler: BaseHTTPRequestHandler, repository: str, commit: str, path: str, fault: Fault | None
    ) -> None:
        content = self.repositories[repository].get(path)
        if content is None:
            self.refuse(handler, 404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_sha1(content)}"'}
        if not is_lfs(path):
            self.send(handler, content, headers, fault=fault)
            return
        sha256 = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        headers |= {"Location": f"{self.storage.url}/{sha256}?signature=good"}
        self.send(handler, b"Found", headers, 302)


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


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


@dataclass
class Cut:
    """What a proxy does to one connection that is longer. after: bytes from the server that still pass."""

    after: int


class Proxy:
    """Passes connections on to a server, but for those that `cuts` are for, one each."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.cuts: list[Cut] = []
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(self._address)
        threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
        passed = 0
        with client, server:
            try:
                while chunk := server.recv(65536):
                    cut = self.cuts[0] if self.cuts else None
                    if cut is not None and passed + len(chunk) > cut.after:
                        self.cuts.pop(0)
                        client.sendall(chunk[: max(0, cut.after - passed)])
                        # Closing alone would leave it open for the thread that reads from it.
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    client.sendall(chunk)
                    passed += len(chunk)
            except OSError:
                return


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


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


class TokenRegistry(Server):
    """A registry that wants tokens, gives them to who logs in, and keeps its blobs in a storage elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage()
        self.manifests: dict[str, bytes] = {}
        self.realm = f"{self.url}/token"
        self.num_tokens = 0

    def close(self) -> None:
        self.storage.close()
        super().close()

    def add(self, files: dict[str, bytes], tag: str) -> None:
        """An artifact of these files."""
        layers = []
        for name, content in files.items():
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            self.storage.blobs[digest] = content
            note = {"org.opencontainers.image.title": name}
            layers.append(
                {"mediaType": "application/x", "digest": digest, "size": len(content), "annotations": note}
            )
        self.manifests[tag] = json.dumps({"schemaVersion": 2, "layers": layers}).encode()

    def answer(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        if asked.path == "/token":
            self._token(handler, asked)
            return
        fault = self.fault_of(asked.path)
        if fault is not None and fault.status is not None:
            self.send(handler, b"", fault=fault)
        elif asked.headers.get("authorization") != f"Bearer token-{self.num_tokens}":
            challenge = f'Bearer realm="{self.realm}",service="the registry",scope="repository:team/a:pull"'
            self.send(handler, b"{}", {"WWW-Authenticate": challenge}, 401)
        elif "/manifests/" in asked.path:
            content = self.manifests.get(asked.path.rpartition("/")[2])
            self.send(handler, content or b"{}", status=200 if content else 404, fault=fault)
        else:
            digest = asked.path.rpartition("/")[2]
            self.send(handler, b"", {"Location": f"{self.storage.url}/{digest}?signature=good"}, 307)

    def _token(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        is_known = asked.headers.get("authorization") == f"Basic {basic('reader', 'secret')}"
        is_right = asked.query == {"service": ["the registry"], "scope": ["repository:team/a:pull"]}
        if not (is_known and is_right):
            self.send(handler, b"{}", status=401)
            return
        self.num_tokens += 1
        self.send(handler, json.dumps({"token": f"token-{self.num_tokens}"}).encode())


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
