"""Headway in a cluster, as a user installs it: the chart, by helm, and removed again."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.definitions import MONITORING, files_of
from e2e.cluster.session import (
    CONTEXT_VARIABLE,
    HOST_MOUNTS_VARIABLE,
    OPERATOR_IMAGE_VARIABLE,
    RUNTIME_IMAGE_VARIABLE,
)
from e2e.cluster.settings import read_settings
from e2e.kubernetes import Kubernetes, Object
from e2e.observed_service import NAMESPACE

CHECKOUT = Path(__file__).resolve().parents[1]
CHART = CHECKOUT / "charts" / "headway"
RELEASE = "headway"
SYSTEM_NAMESPACE = "headway-system"
WHERE = f"--namespace={SYSTEM_NAMESPACE}"


def has_cluster() -> bool:
    """Whether `python -m e2e.cluster run` has said which images are under test."""
    return bool(os.environ.get(OPERATOR_IMAGE_VARIABLE))


def the_cluster() -> Kubernetes:
    """The cluster of `python -m e2e.cluster run`, or the one that HEADWAY_E2E_CONTEXT names."""
    return Kubernetes(
        context=os.environ.get(CONTEXT_VARIABLE, ""), has_pod_network=HOST_MOUNTS_VARIABLE in os.environ
    )


@contextlib.contextmanager
def installed_chart(kubernetes: Kubernetes, *values: str) -> Iterator[Kubernetes]:
    """The chart in a namespace that admits only restricted pods. values: of the chart, NAME=JSON.

    The service's namespace does too, unless its replicas mount the runtime from the host.
    """
    if kubernetes.has_pod_network:
        apply_monitoring_kinds(kubernetes)
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubernetes.apply(
        namespace(SYSTEM_NAMESPACE, restricted),
        namespace(NAMESPACE, {} if kubernetes.has_pod_network else restricted),
    )
    settings = [f"--set-json={value}" for value in values]
    if kubernetes.has_pod_network:
        settings.append("--set=allowUnrestrictedTemplates=true")
    for value, variable in (("image", OPERATOR_IMAGE_VARIABLE), ("runtimeImage", RUNTIME_IMAGE_VARIABLE)):
        repository, tag = os.environ[variable].rsplit(":", 1)
        settings += [f"--set-string={value}.repository={repository}", f"--set-string={value}.tag={tag}"]
    kubernetes.helm("install", RELEASE, str(CHART), WHERE, *settings, "--wait", "--timeout=90s", seconds=120)
    try:
        yield kubernetes
    finally:
        kubernetes.kubectl("delete", "inferenceservices", "--all", f"--namespace={NAMESPACE}")
        kubernetes.helm("uninstall", RELEASE, WHERE, "--wait")
        kubernetes.kubectl("delete", "namespace", NAMESPACE, SYSTEM_NAMESPACE, "--timeout=90s", seconds=100)


def apply_monitoring_kinds(kubernetes: Kubernetes) -> None:
    """The kinds of the Prometheus operator, which itself is not there: the tests do what it would."""
    for file in files_of(MONITORING, read_settings().cache):
        kubernetes.kubectl("apply", "--server-side", f"--filename={file}")


def namespace(name: str, labels: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
