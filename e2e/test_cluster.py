"""The test cluster itself: a real one, and gone without a trace when it is taken down."""

import http.client
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.session import OPERATOR_IMAGE_VARIABLE
from e2e.kubernetes import Kubernetes, eventually

CHECKOUT = Path(__file__).resolve().parents[1]
NAMESPACE = "cluster-test"
WHERE = f"--namespace={NAMESPACE}"
OTHER = "headway-e2e-other"
ECHO = """
import http.server, socket

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(socket.gethostname().encode())

http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""
ASK = "import urllib.request; print(urllib.request.urlopen('http://echo/', timeout=3).read().decode())"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def own_cluster(kubernetes: Kubernetes) -> Iterator[None]:
    """Only the cluster that was made here is under test."""
    if not kubernetes.has_pod_network:
        pytest.skip("the cluster is the user's own")
    kubernetes.kubectl("create", "namespace", NAMESPACE)
    yield
    kubernetes.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


async def test_service_spreads_over_its_pods_and_resolves_by_name(kubernetes: Kubernetes) -> None:
    labels = {"app": "echo"}
    container = {
        "name": "echo",
        "image": os.environ[OPERATOR_IMAGE_VARIABLE],
        "command": ["python3", "-c", ECHO],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    meta = {"name": "echo", "namespace": NAMESPACE}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    ports = [{"port": 80, "targetPort": 8000}]
    kubernetes.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"selector": labels, "ports": ports},
        },
    )
    kubernetes.kubectl("rollout", "status", "deployment/echo", WHERE, "--timeout=60s", seconds=70)
    pods = {pod["metadata"]["name"] for pod in kubernetes.list("pods", NAMESPACE, "app=echo")}
    assert len(pods) == 2
    address = kubernetes.get("service", "echo", NAMESPACE)["spec"]["clusterIP"]
    seen: set[str] = set()

    def both_answer() -> bool:
        seen.add(answer_of(address))
        return seen == pods

    await eventually("both pods answer through the Service", 60, both_answer)
    assert kubernetes.kubectl("exec", sorted(pods)[0], WHERE, "--", "python3", "-c", ASK).strip() in pods


def answer_of(address: str) -> str:
    connection = http.client.HTTPConnection(address, 80, timeout=3)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except OSError as error:
        raise AssertionError(f"{address}: {error}") from error
    finally:
        connection.close()


def test_cluster_leaves_nothing_behind_even_when_it_is_started_over_a_running_one() -> None:
    """A second cluster beside the first: started, started again as after a kill, taken down."""
    for command in ("up", "up"):
        cluster(command)
        assert traces()
    cluster("down")
    assert traces() == []
    cluster("down")


def cluster(command: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", command],
        cwd=CHECKOUT,
        env=os.environ | {"HEADWAY_E2E_NAME": OTHER},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def traces() -> list[str]:
    """Everything on this machine that bears the other cluster's name."""
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if OTHER in line]
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = arguments.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [text] if OTHER in text else []
    folders = [
        Path("/run/netns") / OTHER,
        Path(tempfile.gettempdir()) / OTHER,
        *Path("/sys/fs/cgroup").glob(f"**/{OTHER}"),
    ]
    return found + [str(folder) for folder in folders if folder.exists()]
