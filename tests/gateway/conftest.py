"""Replicas whose faults a test decides, and gateways in front: in this process or as the real command.

A replica speaks real HTTP over a real socket, written by hand so that it can break the protocol at any byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from headway_gateway.application import Application
from headway_gateway.backend import BackendEntry, BackendState
from headway_gateway.config import GatewayConfig
from headway_gateway.lifecycle import make_server
from headway_gateway.upstream import Upstream

PATIENCE_SECONDS = 30.0


@dataclass
class Received:
    """A request as it came in. Header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Stream:
    """One answer that the test sends piece by piece."""

    request: Received
    writer: asyncio.StreamWriter
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    is_client_gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def head(self, content_type: str = "text/event-stream") -> None:
        await self.raw(
            f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )

    async def send(self, text: str) -> None:
        await self.raw(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")
        self.is_over.set()

    def die(self) -> None:
        """As a killed process does: the kernel closes the socket."""
        self.writer.close()
        self.is_over.set()


Behaviour = Callable[[Received, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Replica:
    """A small HTTP server on a free port; answers with its name until told otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[Received] = []
        self.num_connections = 0
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.behaviour: Behaviour = self._answer(200, {"replica": name}, {})
        self.accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = self._accept
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def entry(self, state: BackendState = "ready") -> BackendEntry:
        return BackendEntry(self.name, self.url, state)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self.accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on and close those there are."""
        if self._server is None:
            return
        self._server.close()
        await self.hang_up()
        await self._server.wait_closed()
        self._server = None

    async def hang_up(self) -> None:
        """Close every connection in order; go on listening."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def shut_down_connections(self) -> None:
        """Close every connection in the kernel at once, before the event loop can do or see anything."""
        for writer in self._writers:
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    # What it does with a request from now on.

    def answers(self, status: int = 200, body: object = None, headers: dict[str, str] | None = None) -> None:
        self.behaviour = self._answer(status, {"replica": self.name} if body is None else body, headers or {})

    def refuses(self, retry_after: str = "7") -> None:
        self.answers(503, {"error": {"message": f"{self.name} is full"}}, {"Retry-After": retry_after})

    def dies_before_the_head(self) -> None:
        async def die(request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        self.behaviour = die

    def streams_by_hand(self) -> None:
        async def stream(
            request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            one = Stream(request, writer)
            self.streams.put_nowait(one)
            over = asyncio.create_task(one.is_over.wait())
            gone = asyncio.create_task(reader.read(1))
            try:
                await asyncio.wait((over, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    one.is_client_gone.set()
                    writer.close()
            finally:
                for task in (over, gone):
                    task.cancel()
                await asyncio.gather(over, gone, return_exceptions=True)

        self.behaviour = stream

    async def next_stream(self) -> Stream:
        return await asyncio.wait_for(self.streams.get(), PATIENCE_SECONDS)

    def _answer(self, status: int, body: object, headers: dict[str, str]) -> Behaviour:
        async def answer(
            request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            content = json.dumps(body).encode()
            lines = [
                f"HTTP/1.1 {status} X",
                f"Content-Length: {len(content)}",
                "Content-Type: application/json",
            ]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            shown = b"" if request.method == "HEAD" else content
            writer.write("\r\n".join([*lines, "", ""]).encode() + shown)
            await writer.drain()

        return answer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while not writer.is_closing():
                request = await _read_request(reader)
                self.requests.append(request)
                await self.behaviour(request, reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass  # hung up, from either side
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


async def _read_request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines if x)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body)


@dataclass
class Gateway:
    """An application served from this process, over a real socket."""

    url: str
    application: Application

    @property
    def counters(self) -> dict[str, int]:
        return self.application.counters.totals()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the event loop run until the condition holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - any state of the gateway can be waited for
                await asyncio.sleep(0.001)


@dataclass
class Command:
    """`headway gateway` as a process of its own."""

    process: asyncio.subprocess.Process
    url: str
    log_path: Path

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SECONDS)

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    async def until_logged(self, text: str) -> None:
        """Wait for a log line whose message has this in it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(text in line["message"] for line in self.log):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)


StartReplica = Callable[[str], Awaitable[Replica]]
StartGateway = Callable[..., Awaitable[Gateway]]
StartCommand = Callable[..., Awaitable[Command]]


@pytest.fixture
async def start_replica() -> AsyncIterator[StartReplica]:
    """Make a replica of a name; all are stopped at the end."""
    replicas: list[Replica] = []

    async def start(name: str) -> Replica:
        replica = Replica(name)
        await replica.start()
        replicas.append(replica)
        return replica

    yield start
    for replica in replicas:
        await replica.stop()


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """Serve an application in front of replicas; keyword arguments are fields of its config."""
    async with AsyncExitStack() as stack:

        async def start(*replicas: Replica, upstream: Upstream | None = None, **fields: Any) -> Gateway:
            config = GatewayConfig(
                host="127.0.0.1", port=0, backends_file=Path("unused"), kubernetes_service=None, **fields
            )
            application = Application(config, "0.test", upstream)
            stack.push_async_callback(application.close)
            runner = web.ServerRunner(make_server(application), shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            listener = socket.create_server(("127.0.0.1", 0))
            await web.SockSite(runner, listener).start()
            application.pool.update([replica.entry() for replica in replicas])
            return Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", application)

        yield start


@pytest.fixture
async def start_command(tmp_path: Path) -> AsyncIterator[StartCommand]:
    """Start `python -m headway gateway` with these arguments; it is killed at the end if it still runs."""
    commands: list[Command] = []

    async def start(
        *arguments: str, environment: dict[str, str] | None = None, pass_fds: tuple[int, ...] = ()
    ) -> Command:
        number = len(commands)
        port_file, log_path = tmp_path / f"port-{number}", tmp_path / f"log-{number}"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headway", "gateway", "--port", "0", "--port-file", str(port_file)),
                *arguments,
                stderr=log,
                env={**os.environ, **(environment or {})},
                pass_fds=pass_fds,
            )
        command = Command(process, "", log_path)
        commands.append(command)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not port_file.exists():
                assert process.returncode is None, log_path.read_text()
                await asyncio.sleep(0.01)
        command.url = f"http://127.0.0.1:{int(port_file.read_text())}"
        return command

    yield start
    for command in commands:
        if command.process.returncode is None:
            command.process.kill()
        await command.process.wait()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client with a connection for each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    ) as session:
        yield session


class Table:
    """A backends file, replaced as the local cluster replaces it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_writes = 0

    def write(self, *entries: BackendEntry) -> None:
        rows = [{"id": entry.id, "url": entry.url, "state": entry.state} for entry in entries]
        self.write_raw(json.dumps({"version": 1, "backends": rows}))

    def write_raw(self, content: str) -> None:
        self._num_writes += 1
        draft = self.path.with_name(f"{self.path.name}.{self._num_writes}")
        draft.write_text(content)
        draft.replace(self.path)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A table of backends, not yet written."""
    return Table(tmp_path / "backends.json")


@dataclass
class OperatorKey:
    """A key pair of an operator; the public half as PEM."""

    private: Ed25519PrivateKey

    @property
    def public_pem(self) -> bytes:
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def make_key() -> Callable[[], OperatorKey]:
    """Make a new key pair."""
    return lambda: OperatorKey(Ed25519PrivateKey.generate())
