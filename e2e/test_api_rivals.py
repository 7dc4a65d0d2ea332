"""What others do to the operator's objects: who changes them, refuses them or denies them is told in its own
words and outlived; nobody's writes are fought.
"""

from typing import Any

import pytest

from e2e.api_objects import children, condition
from e2e.conftest import eventually
from headway_operator.cluster import kubernetes_fields
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.passes import Outcome
from headway_operator.state import ServiceKey


async def test_what_somebody_changed_once_is_repaired_and_a_rival_is_not_fought(
    api: KubernetesApi,
    key: ServiceKey,
    cluster: KubernetesCluster,
    take_pass: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await take_pass()

    async def rival() -> None:
        path = f"/api/v1/namespaces/{key.namespace}/services/demo"
        body = {"spec": {"selector": {"serving.headway.dev/component": "mine"}}}
        await api._call(
            "PATCH",
            path,
            query={"fieldManager": "rival"},
            body=body,
            content_type="application/merge-patch+json",
        )

    async def selector() -> str:
        service = await api.get("Service", key.namespace, "demo")
        assert service is not None
        return str(service["spec"]["selector"]["serving.headway.dev/component"])

    async def later() -> Outcome:
        cluster._applied.clear()  # a minute later
        outcome: Outcome = await take_pass()
        return outcome

    await rival()
    assert (await later()).problems == []
    assert await selector() == "gateway"  # drift is repaired
    await rival()
    for _ in range(3):
        outcome = await later()
        assert await selector() == "mine"  # nobody wins by writing faster
        degraded = condition(outcome.status, "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "FieldConflict")
        assert "rival set .spec.selector of Service 'demo' again and again" in degraded["message"]
    monkeypatch.setattr(kubernetes_fields, "PEACE_SECONDS", 0.0)  # ten minutes later
    assert (await later()).problems == []
    assert await selector() == "gateway"


async def test_a_webhook_of_others_that_cannot_be_asked_is_told_and_outlived(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster, take_pass: Any
) -> None:
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"], "resources": ["services"]}]
    here = {"matchLabels": {"kubernetes.io/metadata.name": key.namespace}}
    webhook = {
        "name": "policy.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/no-one"},
        "rules": rules,
        "namespaceSelector": here,
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    name = f"test-{key.namespace}"
    await api._call("POST", path, body={"metadata": {"name": name}, "webhooks": [webhook]})
    try:

        async def is_refused() -> Outcome | None:
            cluster._applied.clear()  # a minute later
            outcome: Outcome = await take_pass()
            return outcome if outcome.problem_reason == "AdmissionRefused" else None

        outcome = await eventually(is_refused)
        degraded = condition(outcome.status, "Degraded")
        assert degraded["reason"] == "AdmissionRefused"
        assert 'failed calling webhook "policy.example.com"' in degraded["message"]
        made = await children(api, key)
        assert "Deployment demo-gateway" in made  # the other steps went on
    finally:
        await api._call("DELETE", f"{path}/{name}")

    await eventually(lambda: _is_well(cluster, take_pass))
    assert "Service demo" in await children(api, key)


async def test_a_policy_that_denies_a_child_is_told_in_its_own_words_and_outlived(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster, take_pass: Any
) -> None:
    group, name = "/apis/admissionregistration.k8s.io/v1", f"test-{key.namespace}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["services"]}
    policy = {
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "has(object.metadata.annotations)", "message": "say whose it is"}],
        },
    }
    here = {"matchLabels": {"kubernetes.io/metadata.name": key.namespace}}
    matching = {"namespaceSelector": here}
    binding = {
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": matching},
    }
    made = {"validatingadmissionpolicies": policy, "validatingadmissionpolicybindings": binding}
    for plural, body in made.items():
        await api._call("POST", f"{group}/{plural}", body=body)

    async def is_refused() -> Outcome | None:
        cluster._applied.clear()
        await api.delete("Service", key.namespace, "demo")
        outcome: Outcome = await take_pass()
        return outcome if outcome.problem_reason == "AdmissionRefused" else None

    try:
        outcome = await eventually(is_refused)  # a new policy counts a moment after it is made
        degraded = condition(outcome.status, "Degraded")
        assert degraded["reason"] == "AdmissionRefused"
        assert f"ValidatingAdmissionPolicy '{name}'" in degraded["message"]
        assert "say whose it is" in degraded["message"]
        assert "Deployment demo-gateway" in await children(api, key)  # the other steps went on
    finally:
        for plural in reversed(made):
            await api._call("DELETE", f"{group}/{plural}/{name}")

    await eventually(lambda: _is_well(cluster, take_pass))
    assert "Service demo" in await children(api, key)


async def _is_well(cluster: KubernetesCluster, take_pass: Any) -> bool:
    """Whether a pass that applies every child anew meets no problem."""
    cluster._applied.clear()
    outcome: Outcome = await take_pass()
    return outcome.problems == []
