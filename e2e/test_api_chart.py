"""The chart's objects and the pods of services as a real API server judges them, with admission; no node."""

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.binaries import build
from e2e.cluster.settings import read_settings
from e2e.installation import CHART, SYSTEM_NAMESPACE, namespace
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError
from headway_operator.manifests import render
from headway_operator.manifests.restricted import faults
from headway_operator.spec import parse

CALL_SECONDS = 60.0
RESTRICTED = "restricted"
EVERYTHING = {
    "model": {"source": "s3://models/llama", "credentialsSecretRef": {"name": "keys"}},
    "tensorParallelSize": 2,
    "gpu": {"product": "NVIDIA-H200"},
    "kvOffload": {"hostMemory": "8Gi"},
    "auth": {"apiKeysSecretRef": {"name": "keys"}},
    "scheduling": {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "gateway": {
        "resources": {"limits": {"memory": "1Gi"}},
        "scheduling": {"tolerations": [{"key": "front", "operator": "Exists"}]},
        "template": {"metadata": {"annotations": {"team": "search"}}},
    },
    "replicas": 2,
}


async def output_of(*command: str | Path, stdin: str = "") -> str:
    """Both streams, for a command that must succeed."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(stdin.encode()), CALL_SECONDS)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def rendered(*settings: str) -> str:
    helm = build(["helm"], read_settings().cache)["helm"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    return await output_of(helm, "template", "headway", CHART, f"--namespace={SYSTEM_NAMESPACE}", *arguments)


@pytest.fixture
async def system(bare_api: KubernetesApi) -> None:
    """The operator's namespace, and one of services, which admit restricted pods alone."""
    labels = {f"pod-security.kubernetes.io/{mode}": RESTRICTED for mode in ("enforce", "warn")}
    for name in (SYSTEM_NAMESPACE, "models"):
        path = "/api/v1/namespaces"
        if await bare_api._call("GET", f"{path}/{name}", absent_is_none=True) is None:
            await bare_api._call("POST", path, body=namespace(name, labels))


async def admitted(api: KubernetesApi, where: str, template: dict[str, Any]) -> None:
    """Would such a pod be let in? Deployments are never refused, only their pods are."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "dry", "labels": template["metadata"]["labels"]},
        "spec": {**template["spec"], "priorityClassName": None},
    }
    await api._call("POST", f"/api/v1/namespaces/{where}/pods", query={"dryRun": "All"}, body=body)


@pytest.mark.parametrize(
    "settings",
    [(), ("watchNamespace=models", "networkPolicy.apiServerPorts[0]=8443", "monitoring.namespace=")],
    ids=["all namespaces", "one namespace"],
)
@pytest.mark.usefixtures("system")
async def test_every_object_of_the_chart_is_one(api_kubeconfig: Path, settings: tuple[str, ...]) -> None:
    kubectl = build(["kubernetes"], read_settings().cache)["kubectl"]
    text = await rendered(*settings)
    flags = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    output = await output_of(
        *(kubectl, f"--kubeconfig={api_kubeconfig}", "apply", *flags, "--filename=-"), stdin=text
    )
    objects = [document for document in yaml.safe_load_all(text) if document]
    assert len(objects) > 10
    for manifest in objects:
        assert f"/{manifest['metadata']['name']} serverside-applied" in output
    assert "Warning" not in output


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("settings", "where"), [((), "default"), (("--set=watchNamespace=models",), "models")]
)
async def test_notes_tell_commands_that_work(
    api_kubeconfig: Path, settings: tuple[str, ...], where: str
) -> None:
    programs = build(["helm", "kubernetes"], read_settings().cache)
    server = f"--kubeconfig={api_kubeconfig}"
    # The definition is there, and not of a release.
    flags = ("--dry-run=client", "--take-ownership", f"--namespace={SYSTEM_NAMESPACE}", *settings)
    output = await output_of(programs["helm"], server, "install", "headway", CHART, *flags)
    notes = textwrap.dedent(output.partition("NOTES:\n")[2])
    [(target, manifest)] = re.findall(
        r"kubectl --namespace (\S+) apply .*<<'END'\n(.*?)\nEND", notes, re.DOTALL
    )
    assert target == where
    service = textwrap.dedent(manifest)
    made = await output_of(
        programs["kubectl"],
        server,
        f"--namespace={target}",
        "apply",
        "--dry-run=server",
        "--filename=-",
        stdin=service,
    )
    assert f"inferenceservice.serving.headway.dev/{parse(yaml.safe_load(service)).name} created" in made
    assert f"kubectl --namespace {target} wait inferenceservice/demo --for=condition=Ready" in notes


@pytest.mark.usefixtures("system")
async def test_the_operators_pod_is_admitted_as_restricted(bare_api: KubernetesApi) -> None:
    objects = [document for document in yaml.safe_load_all(await rendered()) if document]
    [deployment] = [one for one in objects if one["kind"] == "Deployment"]
    await admitted(bare_api, SYSTEM_NAMESPACE, deployment["spec"]["template"])


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("spec", [{"replicas": 1, "model": {"source": "pvc://claim/a"}}, EVERYTHING])
async def test_pods_of_services_are_admitted_as_restricted(
    bare_api: KubernetesApi, spec: dict[str, Any]
) -> None:
    for template in templates(bare_api, spec):
        await admitted(bare_api, "models", template)


def templates(
    api: KubernetesApi, spec: dict[str, Any], *, allows_unrestricted: bool = False
) -> list[dict[str, Any]]:
    """Of the gateway and of the replicas."""
    service = parse(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "demo", "namespace": "models"},
            "spec": spec,
        }
    )
    cluster = KubernetesCluster(
        api, runtime_image="runtime:1", gateway_image="gateway:1", allows_unrestricted=allows_unrestricted
    )
    children = render(service, cluster.site, "a public key", frozenset()).manifests
    return [child["spec"]["template"] for child in children if child["kind"] == "Deployment"]


def of_runtime(**security: Any) -> dict[str, Any]:
    return {"containers": [{"name": "runtime", "securityContext": security}]}


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("pod", "is_restricted"),
    [
        ({"runtimeClassName": None, "nodeSelector": {"a": "b"}}, 1),
        (of_runtime(runAsUser=1000), 1),
        (of_runtime(capabilities={"add": ["NET_BIND_SERVICE"]}), 1),
        ({"volumes": [{"name": "v", "csi": {"driver": "secrets.example", "readOnly": True}}]}, 1),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, 0),
        ({"volumes": [{"name": "v", "nfs": {"server": "a", "path": "/"}}]}, 0),
        ({"hostNetwork": True}, 0),
        ({"hostIPC": True}, 0),
        (of_runtime(privileged=True, allowPrivilegeEscalation=True), 0),
        (of_runtime(allowPrivilegeEscalation=True), 0),
        (of_runtime(capabilities={"drop": ["NET_RAW"]}), 0),
        (of_runtime(capabilities={"add": ["SYS_ADMIN"]}), 0),
        (of_runtime(runAsNonRoot=False), 0),
        (of_runtime(runAsUser=0), 0),
        (of_runtime(seccompProfile={"type": "Unconfined"}), 0),
        (of_runtime(appArmorProfile={"type": "Unconfined"}), 0),
        (of_runtime(seLinuxOptions={"type": "spc_t"}), 0),
        (of_runtime(seLinuxOptions={"user": "root"}), 0),
        ({"containers": [{"name": "sidecar", "image": "sidecar:1"}]}, 0),
        ({"securityContext": {"runAsUser": 0}}, 0),
    ],
)
async def test_the_operator_and_kubernetes_agree_on_what_is_restricted(
    bare_api: KubernetesApi, pod: dict[str, Any], is_restricted: int
) -> None:
    """Kubernetes' own admission says of the same pod what `faults` says of it."""
    runtime = templates(bare_api, {**EVERYTHING, "template": {"spec": pod}}, allows_unrestricted=True)[1]
    assert (faults(runtime) == []) == bool(is_restricted)
    if is_restricted:
        await admitted(bare_api, "models", runtime)
        return
    with pytest.raises(ClusterError, match=r"violates PodSecurity|disallowed by cluster policy"):
        await admitted(bare_api, "models", runtime)
