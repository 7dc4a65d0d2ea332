"""The client against raw connections: how answers end, when connections are used again, TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headway_bench import http_client
from headway_bench.answer import WholeBody
from headway_bench.http_client import (
    Address,
    Client,
    ConnectError,
    DisconnectedError,
    ProtocolError,
    Response,
)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handle: Handle, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """A client of a server that does this with each connection."""

    async def then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(then_close, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    client = Client(Address("http" if context is None else "https", "127.0.0.1", port, "/at"), {"X": "y"})
    try:
        yield client
    finally:
        client.close()
        server.close()


def answering(*answers: bytes) -> Handle:
    """One after the other on a connection, each written in two pieces."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer[:7])
            await writer.drain()
            writer.write(answer[7:])

    return handle


def repeating(answer: bytes) -> Handle:
    return answering(*[answer] * 100)


async def ask(client: Client) -> tuple[bytes, Response]:
    class Kept(WholeBody):
        text = b""

        def feed(self, data: bytes, at_seconds: float) -> None:
            self.text += data

    receiver, response = Kept(), Response()
    async with asyncio.timeout(10):
        await client.get("/path", receiver, response)
    return receiver.text, response


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(CHUNKED + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n", id="chunked"),
        pytest.param(LENGTH + b"ab", id="of known length"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nab", id="until the connection closes"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH + b"ab", id="after a word of patience"),
    ],
)
async def test_an_answer_ends_where_http_says(answer: bytes) -> None:
    async with serving(answering(answer)) as client:
        text, response = await ask(client)
    assert (text, response.status) == (b"ab", 200)
    assert response.ended_at_seconds > 0


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        pytest.param(b"", DisconnectedError, id="nothing"),
        pytest.param(b"HTTP/1.1 200", DisconnectedError, id="half a head"),
        pytest.param(CHUNKED + b"1\r\na\r\n", DisconnectedError, id="a stream cut"),
        pytest.param(LENGTH + b"a", DisconnectedError, id="too short a body"),
        pytest.param(b"SSH-2.0-x\r\n\r\n", ProtocolError, id="another protocol"),
    ],
)
async def test_what_ends_otherwise_is_an_error(answer: bytes, want: type[Exception]) -> None:
    async with serving(answering(answer)) as client:
        with pytest.raises(want):
            await ask(client)


async def test_the_request_carries_path_prefix_and_headers() -> None:
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(LENGTH + b"ok")

    async with serving(handle) as client:
        await ask(client)
    assert seen[0].startswith(b"GET /at/path HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX: y\r\n" in seen[0]


async def test_a_connection_is_used_again_but_not_when_it_has_grown_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(repeating(LENGTH + b"ok")) as client:
        _, first = await ask(client)
        _, second = await ask(client)
        assert first.connect_seconds is not None
        assert second.connect_seconds is None
        assert client.num_opened == 1
        monkeypatch.setattr(http_client, "KEEP_ALIVE_SECONDS", 0.0)
        await ask(client)
        assert client.num_opened == 2


@pytest.mark.parametrize("answers", [1, 2])
async def test_a_connection_that_the_server_closed_while_idle_is_not_used(answers: int) -> None:
    async with serving(answering(*[LENGTH + b"ok"] * answers)) as client:
        for _ in range(answers):
            await ask(client)
        while client._idle and client._idle[0].is_usable:  # noqa: ASYNC110 - a state of the transport
            await asyncio.sleep(0)
        await ask(client)
        assert client.num_opened == 2


async def test_a_server_that_says_close_is_believed() -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    async with serving(repeating(answer)) as client:
        await ask(client)
        await ask(client)
        assert client.num_opened == 2


async def test_a_cancelled_request_takes_its_connection_with_it() -> None:
    got, gone = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        got.set()
        await reader.read()
        gone.set()

    async with serving(handle) as client:
        task = asyncio.create_task(ask(client))
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            await gone.wait()


async def test_the_beginning_of_a_refusal_is_kept() -> None:
    body = b"x" * 100_000
    head = f"HTTP/1.1 503 Busy\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with serving(answering(head + body)) as client:
        text, response = await ask(client)
    assert (text, response.status) == (b"", 503)
    assert bytes(response.body[:10]) == b"x" * 10
    assert len(response.body) < 70_000


async def test_no_server_is_no_connection() -> None:
    async with serving(answering()) as client:
        pass
    with pytest.raises(ConnectError):
        await ask(client)


async def test_https_is_spoken_and_certificates_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = _write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with serving(repeating(LENGTH + b"ok"), context) as client:
        with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(client)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with serving(repeating(LENGTH + b"ok"), context) as client:
        assert (await ask(client))[0] == b"ok"
        await ask(client)
        assert client.num_opened == 1


def _write_certificate(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
