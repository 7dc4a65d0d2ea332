"""An operator for two namespaces, with the rights that the chart gives it there and nothing cluster-wide."""

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.binaries import build
from e2e.cluster.settings import read_settings
from e2e.conftest import eventually
from e2e.installation import CHART, CHECKOUT, SYSTEM_NAMESPACE
from e2e.operator_process import running_operator
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.names import API_VERSION

Json = dict[str, Any]
WATCHED, OTHER = ("chat", "search"), "elsewhere"
COLLECTIONS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}


async def install(api: KubernetesApi) -> str:
    """The accounts, roles and bindings of the chart for these namespaces; the name of the account."""
    helm = build(["helm"], read_settings().cache)["helm"]
    rendered = await asyncio.create_subprocess_exec(
        *(helm, "template", "headway", CHART, f"--namespace={SYSTEM_NAMESPACE}"),
        *("--set", f"watchNamespaces={{{','.join(WATCHED)}}}"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await rendered.communicate()
    objects = [one for one in yaml.safe_load_all(output.decode()) if one]
    assert not [one for one in objects if one["kind"] == "ClusterRoleBinding"]
    for one in objects:
        if one["kind"] in COLLECTIONS:
            namespace = one["metadata"].get("namespace", SYSTEM_NAMESPACE)
            await api._call("POST", COLLECTIONS[one["kind"]].format(namespace), body=one)
    [account] = [one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"]
    return str(account)


async def kubeconfig_of(api: KubernetesApi, account: str, administrators: Path) -> Path:
    """A kubeconfig with a token of the account instead."""
    path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/{account}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = await api._call("POST", path, body=body)
    assert answer is not None
    config = json.loads(await asyncio.to_thread(administrators.read_text))
    config["users"][0]["user"] = {"token": answer["status"]["token"]}
    own = administrators.with_name("operator-kubeconfig")
    await asyncio.to_thread(own.write_text, json.dumps(config))
    return own


async def test_services_of_two_namespaces_are_looked_after_and_no_others(
    api: KubernetesApi, kubeconfig: Path
) -> None:
    for name in (*WATCHED, OTHER, SYSTEM_NAMESPACE):
        await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    for name in (*WATCHED, OTHER):
        metadata = {"name": "demo", "namespace": name}
        spec = {"model": {"source": "bundled://headway-tiny"}, "replicas": 1}
        service = {"apiVersion": API_VERSION, "kind": "InferenceService", "metadata": metadata, "spec": spec}
        await api.create(service)
    own = await kubeconfig_of(api, await install(api), kubeconfig)

    async def generation(namespace: str) -> int:
        found = await api.get("InferenceService", namespace, "demo")
        assert found is not None
        return int((found.get("status") or {}).get("observedGeneration", 0))

    async def revisions(namespace: str) -> list[Json]:
        found = await api.list("Deployment", namespace)
        return [one for one in found if one["metadata"]["name"] != "demo-gateway"]

    options = [word for name in WATCHED[1:] for word in ("--namespace", name)]
    options += ["--admin-secret-namespace", SYSTEM_NAMESPACE]
    async with running_operator(own, WATCHED[0], *options) as operator:
        for namespace in WATCHED:
            await eventually(lambda namespace=namespace: revisions(namespace))  # type: ignore[misc]
            await api.patch("InferenceService", namespace, "demo", {"spec": {"replicas": 2}})

            async def is_followed(namespace: str = namespace) -> bool:
                [made] = await revisions(namespace)
                return await generation(namespace) == 2 and bool(made["spec"]["replicas"] == 2)

            await eventually(is_followed)
        assert (await operator.health())[1]["services"] == len(WATCHED)
        page = await operator.metrics()
    assert await revisions(OTHER) == []
    assert await generation(OTHER) == 0
    refused = [line for line in page.splitlines() if 'status="403"' in line and "_count" in line]
    assert refused == [], "it asks for nothing that it may not"
    assert "Forbidden" not in operator.output


async def test_a_namespace_that_is_taken_off_keeps_its_services_as_they_were(
    api: KubernetesApi, kubeconfig: Path
) -> None:
    """Those that the test before has left. Nobody writes their status; the command of the page tells it."""
    kept, dropped = WATCHED

    async def service(namespace: str) -> Json:
        found = await api.get("InferenceService", namespace, "demo")
        assert found is not None
        return found

    before = (await service(dropped))["status"]
    own = await kubeconfig_of(api, "headway", kubeconfig)
    async with running_operator(own, kept, "--admin-secret-namespace", SYSTEM_NAMESPACE) as operator:
        for namespace in WATCHED:
            await api.patch("InferenceService", namespace, "demo", {"spec": {"replicas": 3}})

        async def is_followed() -> bool:
            found = await service(kept)
            is_seen = found["status"]["observedGeneration"] == found["metadata"]["generation"]
            return is_seen and f'namespace="{kept}"' in await operator.metrics()

        await eventually(is_followed)
        assert (await operator.health())[1]["services"] == 1
        assert f'namespace="{dropped}"' not in await operator.metrics()
    assert (await service(dropped))["status"] == before
    kubectl = build(["kubernetes"], read_settings().cache)["kubectl"]
    text = (CHECKOUT / "docs" / "operations.md").read_text()
    [command] = re.findall(r"^    kubectl (get inferenceservices --all-namespaces .*)$", text, re.MULTILINE)
    told = await asyncio.create_subprocess_exec(
        kubectl, f"--kubeconfig={kubeconfig}", *shlex.split(command), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await told.communicate()
    rows = {row.split()[0]: row.split()[2:] for row in output.decode().splitlines()}
    assert rows["NAMESPACE"] == ["ASKED", "SEEN"]
    assert rows[kept][0] == rows[kept][1]
    assert (rows[dropped], rows[OTHER][1]) == (["3", "2"], "<none>")
