"""From the previous chart to this one, and away again: what serves is not touched, and nothing is stranded.

`e2e/previous/` holds the package of the chart's last version. The pods are the same afterwards, not others
that look alike: their uids and restarts are compared, and users are served all the while.
"""

import json
import os
import time
from collections.abc import Iterator

import pytest

from e2e.cluster import lifecycle
from e2e.cluster.session import OPERATOR_IMAGE_VARIABLE, RUNTIME_IMAGE_VARIABLE
from e2e.cluster.settings import read_settings
from e2e.conftest import OPERATOR_PODS
from e2e.disruption import (
    IN_NAMESPACE,
    becomes_ready,
    fixed_service,
    gateway_pods,
    is_ready,
    lives,
    patch,
    record,
    under_load,
)
from e2e.installation import (
    CHART,
    CHECKOUT,
    RELEASE,
    SYSTEM_NAMESPACE,
    WHERE,
    apply_monitoring_kinds,
    namespace,
)
from e2e.kubernetes import CallFailedError, Kubernetes, eventually
from e2e.observed_service import CHILD_KINDS, NAME, NAMESPACE, SERVICE_LABEL, runtime_pods, status

[PREVIOUS] = (CHECKOUT / "e2e" / "previous").glob("headway-*.tgz")
CRD_NAME = "inferenceservices.serving.headway.dev"
CLUSTER_KINDS = (
    "clusterroles,clusterrolebindings,validatingwebhookconfigurations,mutatingwebhookconfigurations,"
    "validatingadmissionpolicies,priorityclasses"
)
NAMESPACED_KINDS = (
    "deployments,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,networkpolicies,"
    "poddisruptionbudgets,jobs,servicemonitors,podmonitors,prometheusrules"
)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def previous(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """The previous chart alone, in a cluster that has never seen another."""
    if not kubernetes.has_pod_network:
        pytest.skip("it deletes the definition, and with it every service of the cluster")
    apply_monitoring_kinds(kubernetes)
    kubernetes.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found", "--timeout=60s")
    kubernetes.apply(namespace(SYSTEM_NAMESPACE, {}), namespace(NAMESPACE, {}))
    settings = ["--set=intervalSeconds=2", "--set=allowUnrestrictedTemplates=true", "--set=logFormat=json"]
    for value, variable in (("image", OPERATOR_IMAGE_VARIABLE), ("runtimeImage", RUNTIME_IMAGE_VARIABLE)):
        repository, tag = os.environ[variable].rsplit(":", 1)
        settings += [f"--set-string={value}.repository={repository}", f"--set-string={value}.tag={tag}"]
    began = time.time()
    kubernetes.helm(
        "install", RELEASE, str(PREVIOUS), WHERE, *settings, "--wait", "--timeout=90s", seconds=120
    )
    yield kubernetes
    kubernetes.older_charts.append((began, time.time()))
    kubernetes.kubectl("delete", "inferenceservices", "--all", IN_NAMESPACE, "--ignore-not-found")
    kubernetes.kubectl("delete", "namespace", NAMESPACE, SYSTEM_NAMESPACE, "--timeout=90s", seconds=100)


@pytest.fixture
def previous_url(previous: Kubernetes) -> Iterator[str]:
    with previous.service_url(NAME, NAMESPACE) as found:
        yield f"{found}/v1"


def serving(kubernetes: Kubernetes) -> dict[str, int]:
    return lives(runtime_pods(kubernetes) + gateway_pods(kubernetes))


def another_image(kubernetes: Kubernetes) -> str:
    """The same content under another tag: a newer operator, as far as references tell."""
    repository, tag = os.environ[OPERATOR_IMAGE_VARIABLE].rsplit(":", 1)
    lifecycle.tag_image(read_settings(), f"{repository}:{tag}", f"{repository}:{tag}-newer")
    return f"{tag}-newer"


async def test_the_previous_chart_serves(previous: Kubernetes) -> None:
    wanted = fixed_service(previous, replicas=2, gateways=1)
    del wanted["spec"]["gateway"]  # a field of the chart to come
    previous.apply(wanted)
    await becomes_ready(previous, 2)
    with pytest.raises(CallFailedError, match="does not exist"):
        previous.kubectl("explain", "inferenceservice.spec.gateway")


async def test_an_upgrade_touches_nothing_that_serves(previous: Kubernetes, previous_url: str) -> None:
    before, revision = serving(previous), status(previous)["revision"]
    [old] = previous.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS)
    tag = another_image(previous)
    changes = [f"--set-string={image}.tag={tag}" for image in ("image", "runtimeImage")]
    async with under_load(previous_url) as load:
        previous.helm(
            *("upgrade", RELEASE, str(CHART), WHERE, "--reset-then-reuse-values", *changes),
            *("--wait", "--timeout=90s"),
            seconds=120,
        )
        [new] = previous.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS)
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        [container] = new["spec"]["containers"]
        assert container["image"].endswith(tag)
        assert {"--log-format=json", "--interval-seconds=2", "--allow-unrestricted-templates"} <= set(
            container["args"]
        )
        # Its definition has come with it: what the previous one did not know is done, and restarts nothing.
        assert "gateway" in previous.kubectl("explain", "inferenceservice.spec.gateway")
        patch(previous, {"gateway": {"replicas": 2}})
        await eventually(
            "there is another gateway",
            120,
            lambda: len(pods := gateway_pods(previous)) == 2 and all(map(is_ready, pods)),
        )
        await becomes_ready(previous, 2)
    record("upgrade", load)
    assert [outcome.error for outcome in load.failures] == []
    # The new one may tell more of it.
    assert revision.items() <= status(previous)["revision"].items()
    assert before.items() <= serving(previous).items()


async def test_an_uninstalled_chart_strands_nothing_and_what_serves_goes_on(
    previous: Kubernetes, previous_url: str
) -> None:
    before = serving(previous)
    async with under_load(previous_url) as load:
        previous.helm("uninstall", RELEASE, WHERE, "--wait")
        await eventually("nothing of it is left", 60, lambda: stranded(previous) == [])
    assert [outcome.error for outcome in load.failures] == []
    assert serving(previous) == before
    definition = json.loads(previous.kubectl("get", "crd", CRD_NAME, "--output=json"))
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    # Nobody is there to take a finalizer off, so there is none: a service goes with all that it has.
    previous.kubectl("delete", "inferenceservice", NAME, IN_NAMESPACE, "--timeout=30s")
    await eventually("its children go", 120, lambda: not previous.list(CHILD_KINDS, NAMESPACE, SERVICE_LABEL))
    # As the chart's notes say.
    previous.kubectl("delete", "crd", CRD_NAME, "--timeout=60s")


def stranded(kubernetes: Kubernetes) -> list[str]:
    """What bears the release's or the operator's name, beside what every namespace has."""
    own = kubernetes.list(NAMESPACED_KINDS, SYSTEM_NAMESPACE)
    wide = json.loads(kubernetes.kubectl("get", CLUSTER_KINDS, "--output=json"))["items"]
    wide = [one for one in wide if "headway" in one["metadata"]["name"]]
    names = [f"{one['kind']}/{one['metadata']['name']}" for one in [*own, *wide]]
    found = [name for name in names if name not in ("ConfigMap/kube-root-ca.crt", "ServiceAccount/default")]
    assert not found, found
    return found
