"""An API server with nothing behind it: etcd and kube-apiserver on free ports of this machine, no node.

For tests of calls to the API: objects stay as they are written, pods have the status that a test gives them.
"""

import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.binaries import build
from e2e.cluster.settings import read_settings

TOKEN = "administrator"
START_SECONDS = 90.0
# Room for the Services of thousands of objects: where addresses are used up, each one more is refused.
SERVICE_RANGE = "10.96.0.0/12"
STOP_SECONDS = 20.0


@contextmanager
def running_api_server(folder: Path) -> Iterator[Path]:
    """Yield the path of a kubeconfig with every right; state and logs lie in `folder`."""
    programs = build(["etcd", "kubernetes"], read_settings().cache)
    client, peer, secure = _free_ports(3)
    etcd_url = f"http://127.0.0.1:{client}"
    tokens, kubeconfig = folder / "tokens.csv", folder / "kubeconfig"
    tokens.write_text(f"{TOKEN},administrator,1,system:masters\n")
    kubeconfig.write_text(json.dumps(_kubeconfig(f"https://127.0.0.1:{secure}")))
    openssl = shutil.which("openssl") or "openssl"
    subprocess.run(
        [openssl, "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True
    )
    etcd = [
        str(programs["etcd"]),
        f"--data-dir={folder / 'etcd'}",
        "--unsafe-no-fsync",
        *(f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}"),
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
    ]
    api_server = [
        str(programs["kube-apiserver"]),
        f"--etcd-servers={etcd_url}",
        *("--bind-address=127.0.0.1", f"--secure-port={secure}", f"--cert-dir={folder / 'certificates'}"),
        *(
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
        ),
        *(f"--service-account-key-file={folder / 'sa.key'}", "--service-account-issuer=https://test"),
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        # There is no controller that would make the service accounts that this one waits for.
        "--disable-admission-plugins=ServiceAccount",
    ]
    processes = []
    try:
        for name, command in (("etcd", etcd), ("kube-apiserver", api_server)):
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        _wait_until_ready(f"https://127.0.0.1:{secure}", processes, folder)
        yield kubeconfig
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its certificate is of its own making
    request = urllib.request.Request(f"{url}/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(
                    f"{process.args!r} ended with {process.returncode}; see the logs in {folder}"
                )
        try:
            with urllib.request.urlopen(request, context=context, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the API server was not ready within {START_SECONDS:g} s; see the logs in {folder}")


def _kubeconfig(server: str) -> dict[str, object]:
    name = "api-server"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": name, "user": {"token": TOKEN}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
