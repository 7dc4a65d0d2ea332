"""A real Prometheus beside the pods, told what to scrape by the monitors that chart and operator write.

Done here is what the Prometheus operator does: a ServiceMonitor or a PodMonitor becomes the addresses of the
pods that it selects, with the labels that it asks for; a PrometheusRule becomes a file of rules.
"""

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.binaries import build
from e2e.cluster.settings import read_settings
from e2e.kubernetes import Kubernetes, Object

SCRAPE_SECONDS = 1
START_SECONDS = 30.0
STOP_SECONDS = 20.0


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **arguments: str) -> Any:
        """`data` of an answer of its API. Raises AssertionError with what it said when it refuses."""
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {arguments}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, each with `metric` and `value`."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found


@contextlib.contextmanager
def running_prometheus(
    kubernetes: Kubernetes, folder: Path, namespaces: tuple[str, ...]
) -> Iterator[Prometheus]:
    """Scrapes what the monitors of these namespaces select now, and evaluates their rules."""
    jobs = [job for namespace in namespaces for job in scrape_jobs(kubernetes, namespace)]
    assert jobs, f"no monitor in {namespaces}"
    rules = [rule for one in namespaces for rule in kubernetes.list("prometheusrules", one)]
    for number, rule in enumerate(rules):
        (folder / f"rules-{number}.yaml").write_text(yaml.safe_dump(rule["spec"]))
    interval = f"{SCRAPE_SECONDS}s"
    configuration = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": interval},
        "scrape_configs": jobs,
        "rule_files": [str(folder / "rules-*.yaml")],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    command = [
        str(build(["prometheus"], read_settings().cache)["prometheus"]),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/-/ready", process, folder / "prometheus.log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def scrape_jobs(kubernetes: Kubernetes, namespace: str) -> list[dict[str, Any]]:
    """One for each endpoint of each monitor."""
    jobs = []
    for kind, endpoints in (("podmonitors", "podMetricsEndpoints"), ("servicemonitors", "endpoints")):
        for monitor in kubernetes.list(kind, namespace):
            pods = _selected(kubernetes, kind, monitor)
            series_job = _series_job(kubernetes, kind, monitor)
            for number, endpoint in enumerate(monitor["spec"][endpoints]):
                jobs.append(
                    {
                        "job_name": f"{kind}/{namespace}/{monitor['metadata']['name']}/{number}",
                        "metrics_path": endpoint["path"],
                        "honor_labels": endpoint.get("honorLabels", False),
                        "static_configs": [
                            _target(pod, monitor, endpoint["port"], series_job) for pod in pods
                        ],
                    }
                )
    return jobs


def _selected(kubernetes: Kubernetes, kind: str, monitor: Object) -> list[Object]:
    """Pods, by their own labels or by those of a Service in front of them."""
    namespace, selector = monitor["metadata"]["namespace"], _text(monitor["spec"]["selector"])
    selectors = [selector]
    if kind == "servicemonitors":
        services = kubernetes.list("services", namespace, selector)
        selectors = [_text({"matchLabels": service["spec"]["selector"]}) for service in services]
    pods = [pod for one in selectors for pod in kubernetes.list("pods", namespace, one)]
    return [
        pod for pod in pods if pod["status"].get("podIP") and not pod["metadata"].get("deletionTimestamp")
    ]


def _text(selector: Object) -> str:
    parts = [f"{name}={value}" for name, value in (selector.get("matchLabels") or {}).items()]
    for expression in selector.get("matchExpressions") or ():
        assert expression["operator"] == "In", expression
        parts.append(f"{expression['key']} in ({','.join(expression['values'])})")
    return ",".join(parts)


def _series_job(kubernetes: Kubernetes, kind: str, monitor: Object) -> str:
    """The label `job` as the Prometheus operator writes it: of a Service its name, else the monitor's."""
    namespace = monitor["metadata"]["namespace"]
    if kind == "podmonitors":
        return f"{namespace}/{monitor['metadata']['name']}"
    [service] = kubernetes.list("services", namespace, _text(monitor["spec"]["selector"]))
    return str(service["metadata"]["name"])


def _target(pod: Object, monitor: Object, port_name: str, job: str) -> dict[str, Any]:
    metadata = pod["metadata"]
    [port] = [
        port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or ()
        if port.get("name") == port_name
    ]
    wanted = {name: metadata["labels"].get(name) for name in monitor["spec"].get("podTargetLabels") or ()}
    labels = {_label(name): value for name, value in wanted.items() if value is not None}
    return {
        "targets": [f"{pod['status']['podIP']}:{port}"],
        "labels": labels | {"namespace": metadata["namespace"], "pod": metadata["name"], "job": job},
    }


def _label(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        said = log.read_text(errors="replace")[-4000:]
        assert process.poll() is None, f"Prometheus ended\n{said}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
            if response.status == 200:
                return
        assert time.monotonic() < deadline, (
            f"Prometheus is not ready\n{log.read_text(errors='replace')[-4000:]}"
        )
        time.sleep(0.1)
