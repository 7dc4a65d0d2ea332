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
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.fetch_job import fetch_job
from headway_operator.manifests.restricted import faults
from headway_operator.spec import parse, parse_cache

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
@pytest.mark.parametrize("source", ["s3://models/llama", "oci://registry.example/llama:1"])
async def test_pods_of_services_are_admitted_as_restricted(
    bare_api: KubernetesApi, spec: dict[str, Any], source: str
) -> None:
    made = {**templates(bare_api, spec), "fetch": template_of_fetch(bare_api, source)}
    for template in made.values():
        await admitted(bare_api, "models", template)
    assert sorted(made) == ["evaluation", "fetch", "gateway", "runtime"]


def cluster_of(api: KubernetesApi, *, allows_unrestricted: bool) -> KubernetesCluster:
    return KubernetesCluster(
        api, runtime_image="runtime:1", gateway_image="gateway:1", allows_unrestricted=allows_unrestricted
    )


def templates(
    api: KubernetesApi, spec: dict[str, Any], *, allows_unrestricted: bool = False
) -> dict[str, dict[str, Any]]:
    """Of the gateway, of the replicas, and of the Job that judges them."""
    service = parse(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "demo", "namespace": "models"},
            "spec": {"quality": {"text": "configmap://judge/text.jsonl"}, **spec},
        }
    )
    site = cluster_of(api, allows_unrestricted=allows_unrestricted).site
    children = render(service, site, "a public key", frozenset()).manifests
    gateway, runtime = (child for child in children if child["kind"] == "Deployment")
    evaluation = evaluation_job(service, site, site.runtime_image, "demo-quality-1a2b3c4d")
    found = {"gateway": gateway, "runtime": runtime, "evaluation": evaluation}
    return {name: child["spec"]["template"] for name, child in found.items()}


def template_of_fetch(
    api: KubernetesApi, source: str, *, allows_unrestricted: bool = False, **spec: Any
) -> dict[str, Any]:
    """Of the Job of a ModelCache."""
    cache = parse_cache(
        {
            "apiVersion": "serving.headway.dev/v1alpha1",
            "kind": "ModelCache",
            "metadata": {"name": "llama", "namespace": "models"},
            "spec": {
                "source": source,
                "credentialsSecretRef": {"name": "keys"},
                "storage": {"size": "1Gi"},
                **spec,
            },
        }
    )
    site = cluster_of(api, allows_unrestricted=allows_unrestricted).site
    template: dict[str, Any] = fetch_job(cache, site, "claim", "llama-fetch-1a2b3c4d")["spec"]["template"]
    return template


def of_runtime(**security: Any) -> dict[str, Any]:
    return runtime(securityContext=security)


def runtime(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "runtime", **fields}]}


def beside(kind: str, **security: Any) -> dict[str, Any]:
    """A further container of that kind, restricted but for this."""
    safe = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {kind: [{"name": "more", "image": "more:1", "securityContext": {**safe, **security}}]}


def asks(**whom: Any) -> dict[str, Any]:
    """A probe or a hook, with nothing of what ours asks."""
    return {"httpGet": None} | {kind: {"port": 8000, **of} for kind, of in whom.items()}


HOST = {"host": "10.0.0.1"}
UNCONFINED = {"type": "Unconfined"}
PRIVILEGED = "[Pp]rivileged"
CAPABILITIES = "unrestricted capabilities"
# What a template adds, and of what Kubernetes' refusal speaks; "" where it refuses nothing.
ADDED: list[tuple[dict[str, Any], str]] = [
    ({"runtimeClassName": None, "nodeSelector": {"a": "b"}}, ""),
    (of_runtime(runAsUser=1000), ""),
    (of_runtime(capabilities={"add": ["NET_BIND_SERVICE"]}), ""),
    (of_runtime(seLinuxOptions={"type": "container_engine_t", "level": "s0"}), ""),
    (of_runtime(appArmorProfile={"type": "Localhost", "localhostProfile": "a"}), ""),
    ({"volumes": [{"name": "v", "csi": {"driver": "secrets.example", "readOnly": True}}]}, ""),
    (beside("initContainers"), ""),
    ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "hostPath"),
    ({"volumes": [{"name": "v", "nfs": {"server": "a", "path": "/"}}]}, "nfs"),
    ({"hostNetwork": True}, "hostNetwork"),
    ({"hostPID": True}, "hostPID"),
    ({"hostIPC": True}, "hostIPC"),
    (runtime(ports=[{"containerPort": 8000, "hostPort": 80}]), "hostPort"),
    (of_runtime(privileged=True, allowPrivilegeEscalation=True), PRIVILEGED),
    (of_runtime(allowPrivilegeEscalation=True), "allowPrivilegeEscalation"),
    (of_runtime(capabilities={"drop": ["NET_RAW"]}), CAPABILITIES),
    (of_runtime(capabilities={"add": ["SYS_ADMIN"]}), CAPABILITIES),
    (of_runtime(runAsNonRoot=False), "runAsNonRoot"),
    ({"securityContext": {"runAsNonRoot": None}}, "runAsNonRoot"),
    (of_runtime(runAsUser=0), "runAsUser"),
    ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
    (of_runtime(seccompProfile=UNCONFINED), "seccompProfile"),
    ({"securityContext": {"seccompProfile": None}}, "seccompProfile"),
    (of_runtime(appArmorProfile=UNCONFINED), "AppArmor"),
    (of_runtime(seLinuxOptions={"type": "spc_t"}), "seLinuxOptions"),
    (of_runtime(seLinuxOptions={"user": "root"}), "seLinuxOptions"),
    (of_runtime(seLinuxOptions={"role": "root"}), "seLinuxOptions"),
    ({"hostUsers": False, **of_runtime(procMount="Unmasked")}, "procMount"),
    # It is validated before the standard is held to, which wants the host's network for such a container.
    ({"hostNetwork": True, **of_runtime(windowsOptions={"hostProcess": True})}, "hostProcess"),
    *((runtime(**{f"{kind}Probe": asks(httpGet=HOST)}), "probe") for kind in ("liveness", "readiness")),
    (runtime(startupProbe=asks(tcpSocket=HOST)), "probe"),
    (runtime(lifecycle={"preStop": asks(httpGet=HOST)}), "lifecycle"),
    (runtime(lifecycle={"postStart": asks(tcpSocket=HOST)}), "lifecycle"),
    (beside("containers", allowPrivilegeEscalation=None), "allowPrivilegeEscalation"),
    (beside("initContainers", allowPrivilegeEscalation=None), "allowPrivilegeEscalation"),
    (beside("initContainers", capabilities={"add": ["SYS_ADMIN"], "drop": ["ALL"]}), CAPABILITIES),
    (beside("initContainers", privileged=True, allowPrivilegeEscalation=True), PRIVILEGED),
    # No pod begins with one; a template that has one is refused for what it asks as well.
    (beside("ephemeralContainers", privileged=True, allowPrivilegeEscalation=True), PRIVILEGED),
]
# The templates of others: of the gateway, and of both kinds of Jobs.
ADDED_ELSEWHERE = [
    (beside("initContainers"), ""),
    (beside("initContainers", allowPrivilegeEscalation=None), "allowPrivilegeEscalation"),
    ({"hostPID": True}, "hostPID"),
]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("place", "pod", "refusal"),
    [
        *(("runtime", *row) for row in ADDED),
        *((place, *row) for place in ("gateway", "evaluation", "fetch") for row in ADDED_ELSEWHERE),
    ],
)
async def test_the_operator_and_kubernetes_agree_on_what_is_restricted(
    bare_api: KubernetesApi, place: str, pod: dict[str, Any], refusal: str
) -> None:
    """Kubernetes' own admission says of the same pod what `faults` says of it."""
    told = {"template": {"spec": pod}}
    if place == "fetch":
        template = template_of_fetch(bare_api, "s3://models/llama", allows_unrestricted=True, **told)
    else:
        spec = {**EVERYTHING, **({"gateway": told} if place == "gateway" else told)}
        template = templates(bare_api, spec, allows_unrestricted=True)[place]
    found = faults(template, account="demo-gateway" if place == "gateway" else None)
    assert (found == []) == (not refusal)
    if not refusal:
        await admitted(bare_api, "models", template)
        return
    with pytest.raises(
        ClusterError, match=f"(violates PodSecurity.*{refusal}|{refusal}.* disallowed by cluster policy)"
    ):
        await admitted(bare_api, "models", template)
