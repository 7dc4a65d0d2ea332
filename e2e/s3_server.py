"""A real S3 server beside the pods, behind a relay that can be slow and that counts who comes.

Compiled like the cluster's own programs. Whoever wants to fetch from it has `AWS_ENDPOINT_URL_S3` say the
relay's address.
"""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session

from e2e.cluster.binaries import build
from e2e.cluster.settings import NODE_IP, read_settings

ACCESS_KEY, SECRET_KEY = "AKIAE2E", "a-secret-of-the-test"
BUCKET = "models"
START_SECONDS = 30.0
CHUNK_BYTES = 1 << 16


@dataclass
class BucketServer:
    """A running server with one bucket."""

    url: str
    relay: "Relay"
    client: Any

    def upload(self, folder: Path, prefix: str) -> int:
        """Put the files of a folder under a prefix; how many bytes they have."""
        files = [path for path in folder.iterdir() if path.is_file()]
        for path in files:
            key = f"{prefix}/{path.name}"
            self.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
        return sum(path.stat().st_size for path in files)


class Relay:
    """Passes connections on. bytes_per_second: to clients, of each connection; None: as fast as can be."""

    def __init__(self, target: tuple[str, int], bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.num_connections = 0
        self._target = target
        self._listener = socket.create_server((NODE_IP, 0))
        self.url = f"http://{NODE_IP}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            up = threading.Thread(target=self._pass_on, args=(client, server), daemon=True)
            up.start()
            self._pass_on(server, client, is_slowed=True)
            up.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, *, is_slowed: bool = False) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                target.sendall(chunk)
                if is_slowed and (rate := self.bytes_per_second):
                    time.sleep(len(chunk) / rate)
        for one in (source, target):  # either end is the end of both
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def running_s3(folder: Path) -> Iterator[BucketServer]:
    """A server that keeps its objects in `folder`, with the bucket BUCKET."""
    program = build(["s3server"], read_settings().cache)["s3server"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, folder, f"127.0.0.1:{port}"],
        env={"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        relay = Relay(("127.0.0.1", port))
        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        client.create_bucket(Bucket=BUCKET)
        yield BucketServer(relay.url, relay, client)
        client.close()
        relay.close()
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except ConnectionRefusedError:
            assert process.poll() is None, "the S3 server has ended"
            assert time.monotonic() < deadline, "the S3 server does not listen"
            time.sleep(0.02)
