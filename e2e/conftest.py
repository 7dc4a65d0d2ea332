"""The cluster that the tests talk to, and what stands there when one of them fails."""

import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e.cluster.lifecycle import log_tails
from e2e.cluster.session import (
    CONTEXT_VARIABLE,
    HOST_MOUNTS_VARIABLE,
    OPERATOR_IMAGE_VARIABLE,
    RUNTIME_IMAGE_VARIABLE,
)
from e2e.cluster.settings import read_settings
from e2e.kubernetes import Kubernetes, Object
from e2e.observed_service import NAME, NAMESPACE

CHART = Path(__file__).resolve().parents[1] / "charts" / "headway"
RELEASE = "headway"
SYSTEM_NAMESPACE = "headway-system"
WHERE = f"--namespace={SYSTEM_NAMESPACE}"
OPERATOR_PODS = "app.kubernetes.io/name=headway-operator"

REPORTS = [
    ["get", "all,inferenceservices,endpointslices,configmaps", "--all-namespaces", "--output=wide"],
    ["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"],
    ["get", "inferenceservices", "--all-namespaces", "--output=yaml"],
    ["describe", "pods", "--all-namespaces"],
    *(
        ["logs", f"--namespace={namespace}", f"--selector={labels}", "--tail=100", "--prefix"]
        for namespace, labels in (
            (SYSTEM_NAMESPACE, "app.kubernetes.io/name=headway-operator"),
            (NAMESPACE, "serving.headway.dev/component=gateway"),
            (NAMESPACE, "serving.headway.dev/component=runtime"),
        )
    ),
]


@pytest.fixture(scope="session")
def kubernetes() -> Kubernetes:
    """The cluster of `python -m e2e.cluster run`, or the one that HEADWAY_E2E_CONTEXT names."""
    if not os.environ.get(OPERATOR_IMAGE_VARIABLE):
        pytest.exit(
            "the cluster tests run as `python -m e2e.cluster run -- python -m pytest e2e` (make e2e)", 2
        )
    return Kubernetes(
        context=os.environ.get(CONTEXT_VARIABLE, ""), has_pod_network=HOST_MOUNTS_VARIABLE in os.environ
    )


@pytest.fixture(scope="module")
def installed(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """The chart, installed by helm into a namespace that admits only restricted pods.

    The service's namespace does too, unless its replicas mount the runtime from the host.
    """
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubernetes.apply(
        namespace(SYSTEM_NAMESPACE, restricted),
        namespace(NAMESPACE, {} if kubernetes.has_pod_network else restricted),
    )
    settings = ["--set=intervalSeconds=2"]
    for value, variable in (("image", OPERATOR_IMAGE_VARIABLE), ("runtimeImage", RUNTIME_IMAGE_VARIABLE)):
        repository, tag = os.environ[variable].rsplit(":", 1)
        settings += [f"--set-string={value}.repository={repository}", f"--set-string={value}.tag={tag}"]
    kubernetes.helm("install", RELEASE, str(CHART), WHERE, *settings, "--wait", "--timeout=90s", seconds=120)
    yield kubernetes
    kubernetes.kubectl("delete", "inferenceservices", "--all", f"--namespace={NAMESPACE}")
    kubernetes.helm("uninstall", RELEASE, WHERE, "--wait")
    kubernetes.kubectl("delete", "namespace", NAMESPACE, SYSTEM_NAMESPACE, "--timeout=90s", seconds=100)


@pytest.fixture(scope="module")
def url(installed: Kubernetes) -> Iterator[str]:
    """The base URL of the service, which an earlier test has made."""
    with installed.service_url(NAME, NAMESPACE) as found:
        yield f"{found}/v1"


def namespace(name: str, labels: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure carries the cluster's own account of what happened."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("kubernetes")
    if report.failed and isinstance(cluster, Kubernetes):
        account = [_account(cluster, arguments) for arguments in REPORTS]
        if cluster.has_pod_network:
            account.append(log_tails(read_settings()))
        report.sections.append(("cluster", "\n".join(account)))
    return report


def _account(cluster: Kubernetes, arguments: list[str]) -> str:
    try:
        output = cluster.kubectl(*arguments)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        output = str(error)
    return f"$ kubectl {' '.join(arguments)}\n{output}"
