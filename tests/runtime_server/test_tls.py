"""HTTPS: real handshakes, clients' certificates, and certificates that are renewed while the server runs."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from headway_runtime.errors import ConfigError
from headway_runtime.server.options import parse_options

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.serialization import KeySerializationEncryption
    from tests.runtime_server.conftest import StartServer

BODY: dict[str, Any] = {"model": "tiny", "prompt": [50, 51, 52], "max_tokens": 40}


def write_certificate(folder: Path, name: str, encryption: KeySerializationEncryption | None = None) -> int:
    """A certificate of 127.0.0.1 that signs itself, as NAME.crt and NAME.key; returns its serial number."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    )
    return certificate.serial_number


def serial_shown(port: int) -> int:
    """Of the certificate that a new connection gets."""
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


@pytest.mark.parametrize("num_processes", [1, 2])
def test_clients_that_know_the_signer_are_served(
    start_server: StartServer, tmp_path: Path, num_processes: int
) -> None:
    write_certificate(tmp_path, "server")
    server = start_server(
        f"--ssl-certfile={tmp_path / 'server.crt'}",
        f"--ssl-keyfile={tmp_path / 'server.key'}",
        f"--api-server-count={num_processes}",
    )
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "server.crt"))
    with (
        httpx.Client(verify=trusted) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        whole = client.completions.create(**BODY).choices[0].text
        stream = client.completions.create(**BODY, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole != ""
        refused = http.post(f"{server.url}/v1/completions", content=b"{", headers={"X-Long": "a" * 70_000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    # Who speaks plain HTTP to it is not answered, and holds nothing up.
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)


def test_clients_may_have_to_show_a_certificate(start_server: StartServer, tmp_path: Path) -> None:
    write_certificate(tmp_path, "server")
    write_certificate(tmp_path, "client")
    write_certificate(tmp_path, "stranger")
    server = start_server(
        f"--ssl-certfile={tmp_path / 'server.crt'}",
        f"--ssl-keyfile={tmp_path / 'server.key'}",
        f"--ssl-ca-certs={tmp_path / 'client.crt'}",
        "--ssl-cert-reqs=1",
    )
    trusted = ssl.create_default_context(cafile=str(tmp_path / "server.crt"))
    assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
    trusted.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
    trusted.load_cert_chain(tmp_path / "stranger.crt", tmp_path / "stranger.key")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health", verify=trusted)


def test_a_renewed_certificate_is_taken_up_and_a_wrong_one_is_not(
    start_server: StartServer, tmp_path: Path
) -> None:
    first = write_certificate(tmp_path, "server")
    server = start_server(
        f"--ssl-certfile={tmp_path / 'server.crt'}",
        f"--ssl-keyfile={tmp_path / 'server.key'}",
        "--enable-ssl-refresh",
    )
    assert serial_shown(server.port) == first
    (tmp_path / "server.key").write_text("not a key")
    deadline = time.monotonic() + 30
    while "renewed certificate not taken" not in server.log:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert serial_shown(server.port) == first
    second = write_certificate(tmp_path, "server")
    while serial_shown(server.port) != second:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_files_of_no_use_are_told_before_the_start(model_folder: Path, tmp_path: Path) -> None:
    write_certificate(tmp_path, "one")
    write_certificate(tmp_path, "two")
    write_certificate(tmp_path, "locked", BestAvailableEncryption(b"secret"))

    def refusal(*arguments: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_options([str(model_folder), *arguments])
        return str(caught.value)

    one = f"--ssl-certfile={tmp_path / 'one.crt'}"
    key = f"--ssl-keyfile={tmp_path / 'one.key'}"
    assert "No such file" in refusal(f"--ssl-certfile={tmp_path / 'none.crt'}")
    assert "--ssl-keyfile" in refusal(one, f"--ssl-keyfile={tmp_path / 'two.key'}")
    locked = f"--ssl-certfile={tmp_path / 'locked.crt'}"
    assert "unencrypted" in refusal(locked, f"--ssl-keyfile={tmp_path / 'locked.key'}")
    assert "--ssl-ca-certs" in refusal(one, key, f"--ssl-ca-certs={tmp_path / 'one.key'}")
    assert "needs --ssl-ca-certs" in refusal(one, key, "--ssl-cert-reqs=2")
    assert "needs --ssl-certfile" in refusal(key)
    assert "needs --ssl-certfile" in refusal("--enable-ssl-refresh")
    options = parse_options([str(model_folder), one, key])
    assert options.tls is not None
    assert options.tls.keyfile == str(tmp_path / "one.key")
