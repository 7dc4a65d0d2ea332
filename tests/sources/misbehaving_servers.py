"""HTTP servers of models that can be told to misbehave: a Hub that speaks the real one's HTTP, a storage, and
a registry that wants tokens; and a proxy that breaks connections."""

import base64
import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD_TOKEN = "hf_good"


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
