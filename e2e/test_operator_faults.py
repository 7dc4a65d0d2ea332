"""The operator as a program on a real API server that misbehaves, and with rivals: nobody's writes meet, and
it recovers by itself.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from e2e.api_objects import make_deployment, pod
from e2e.conftest import eventually
from e2e.fault_proxy import FaultProxy
from e2e.operator_process import edit, generation, running_operator
from headway_operator.cluster import kubernetes_fields
from headway_operator.cluster.kubernetes import CACHED_KINDS, KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.commands.operator import MIN_LIVENESS_SECONDS
from headway_operator.errors import ThrottledError, UnavailableError
from headway_operator.names import OPTIONAL_KINDS
from headway_operator.passes import Outcome
from headway_operator.resync import DOUBT_SECONDS, PERIOD_SECONDS
from headway_operator.state import ServiceKey

# `make e2e-full` sets two minutes; what matters here is longer than the Lease and any backoff of the first
# minute.
AWAY_SECONDS = float(os.environ.get("HEADWAY_E2E_AWAY_SECONDS", "40"))

Json = dict[str, Any]


async def test_an_api_server_that_was_away_finds_everything_as_it_was(
    api: KubernetesApi, key: ServiceKey, proxy: FaultProxy
) -> None:
    async with running_operator(proxy.kubeconfig, key.namespace, "--log-format", "json") as operator:
        await eventually(await edit(api, key, 3))
        before = {
            name: item["metadata"]["resourceVersion"] for name, item in (await children(api, key)).items()
        }
        proxy.go_away()
        await asyncio.sleep(AWAY_SECONDS)  # what is tested is that so much time passes
        assert not await operator.is_leading()
        assert (await operator.health())[0] == 200  # a restart would help nobody
        proxy.come_back()
        after = {
            name: item["metadata"]["resourceVersion"] for name, item in (await children(api, key)).items()
        }
        assert after == before
        await eventually(operator.is_leading, 30)
        began = time.monotonic()
        await eventually(await edit(api, key, 4), 30)
        print(f"seen {time.monotonic() - began:.1f} s after the edit")
        assert operator.process.returncode is None
        metrics = await operator.metrics()
        assert 'headway_operator_api_seconds_count{method="GET",status="0"}' in metrics
        assert "headway_operator_leading 1.0" in metrics
    records = [json.loads(line) for line in operator.output.splitlines()]
    about = [one for one in records if one.get("service") == f"{key.namespace}/demo"]
    assert {one["generation"] for one in about} >= {2}
    assert all({"time", "level", "logger", "message"} <= set(one) for one in records)


@pytest.mark.parametrize(
    ("code", "reason"), [(410, "Expired"), (500, "InternalError")], ids=["expired", "unexpected"]
)
async def test_a_watch_that_ends_in_an_error_begins_anew(
    api: KubernetesApi, key: ServiceKey, proxy: FaultProxy, code: int, reason: str
) -> None:
    async with running_operator(proxy.kubeconfig, key.namespace) as operator:
        await eventually(await edit(api, key, 3))
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
        await proxy.watch_events.put(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        await eventually(lambda: proxy.watch_events.empty())
        second = {**(await api.get("InferenceService", key.namespace, "demo") or {})}
        second["metadata"] = {"name": "second", "namespace": key.namespace}
        second.pop("status", None)
        await api.create(second)
        cluster = KubernetesCluster(api, runtime_image="", gateway_image="")

        async def is_seen() -> bool:
            return await generation(cluster, ServiceKey(key.namespace, "second")) == 1

        await eventually(is_seen, 30)
        assert operator.process.returncode is None


@pytest.mark.timeout(300)
@pytest.mark.skipif(AWAY_SECONDS < 120, reason="takes four minutes; make e2e-full runs it")
async def test_a_watch_that_brings_nothing_is_noticed_and_edits_come_through(
    api: KubernetesApi, key: ServiceKey, proxy: FaultProxy
) -> None:
    async with running_operator(proxy.kubeconfig, key.namespace) as operator:
        await eventually(await edit(api, key, 3))
        proxy.is_frozen = True  # every watch stays open, and says nothing
        seen = await edit(api, key, 4)
        frozen_at = time.monotonic()
        await eventually(seen, PERIOD_SECONDS + 15)  # by a list
        print(f"seen {time.monotonic() - frozen_at:.1f} s after the edit")

        async def is_missed() -> bool:
            return "headway_operator_missed_changes_total 1.0" in await operator.metrics()

        await eventually(is_missed, 2 * DOUBT_SECONDS)
        assert (await operator.health())[0] == 200  # not yet for long enough
        proxy.is_frozen = False  # it goes on, and what it should have shown is lost

        async def is_unhealthy() -> bool:
            status, told = await operator.health()
            return status == 503 and told["watch_lag_seconds"] > told["limit_seconds"]

        await eventually(is_unhealthy, MIN_LIVENESS_SECONDS + 15)
        await eventually(await edit(api, key, 2), 15)

        async def is_well() -> bool:
            return (await operator.health())[0] == 200

        await eventually(is_well, 15)
        assert operator.process.returncode is None


async def test_throttling_is_obeyed_and_passes(key: ServiceKey, proxy: FaultProxy) -> None:
    throttled: list[float] = []

    def answer(request: web.Request) -> web.Response | None:
        if "/leases" in request.path:
            return None
        throttled.append(time.monotonic())
        return web.json_response({"message": "too many requests"}, status=429, headers={"Retry-After": "2"})

    async with await KubernetesApi.connect(proxy.kubeconfig) as api:
        guarded = api.guarded(lambda: True)
        proxy.answer = answer
        with pytest.raises(UnavailableError, match="429: too many requests"):
            await guarded.list("Pod", key.namespace)
        for _ in range(50):
            with pytest.raises(ThrottledError, match="asked to wait, for another"):
                await guarded.list("Pod", key.namespace)
        assert len(throttled) == 1
        lease = Lease(api, key.namespace, "me")
        await lease.seek()
        assert lease.is_held  # leadership does not wait
        proxy.answer = lambda request: None

        async def is_through() -> bool:
            with contextlib.suppress(ThrottledError):
                return await guarded.list("Pod", key.namespace) == []
            return False

        await eventually(is_through)
        assert time.monotonic() - throttled[0] >= 2.0


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


async def test_events_whose_numbers_move_are_told_one_by_one_and_then_together(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster
) -> None:
    for number in range(20):
        await cluster.emit(key, "Warning", "TTFTViolated", f"P95 TTFT {300 + number} ms against 300 ms")
    await cluster.emit(key, "Normal", "Serving", "2 of 2 replicas ready")
    events = await api.list("Event", key.namespace)
    together = [one for one in events if one["message"].startswith("(combined from similar events): ")]
    assert len(events) == 12
    assert [(one["count"], one["message"][-30:]) for one in together] == [
        (10, "P95 TTFT 319 ms against 300 ms")
    ]


async def test_a_probe_that_failed_is_named_from_the_pods_events(
    api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster, make_pod: Any
) -> None:
    killed = {
        "exitCode": 137,
        "reason": "Error",
        "startedAt": "2026-01-02T03:00:00Z",
        "finishedAt": "2026-01-02T03:04:05Z",
    }
    await make_deployment(api, key, "demo-1a2b")
    uid = await make_pod("demo-x", "1a2b", killed)
    for number, (reason, message) in enumerate(
        (
            ("Unhealthy", "Liveness probe failed: HTTP probe failed with statuscode: 500"),
            ("Killing", "Container runtime failed liveness probe, will be restarted"),
        )
    ):
        await api.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"demo-x.{number}", "namespace": key.namespace},
                "involvedObject": {"kind": "Pod", "namespace": key.namespace, "name": "demo-x", "uid": uid},
                "reason": reason,
                "message": message,
                "type": "Warning",
                "lastTimestamp": "2026-01-02T03:03:00Z",
            }
        )
    (replica,) = (await cluster.observe(key)).replicas
    assert (replica.phase, replica.reason) == ("failed", "LivenessProbeFailed")
    assert replica.message == "Liveness probe failed: HTTP probe failed with statuscode: 500"


@pytest.fixture
def make_pod(api: KubernetesApi, key: ServiceKey) -> Callable[[str, str, Json], Awaitable[str]]:
    """A runtime pod of a revision, by its hash, that restarts after an end; returns its uid."""

    async def make(name: str, revision: str, terminated: Json) -> str:
        made = await api.create(pod(key, name, revision=revision))
        container = {
            "name": "runtime",
            "image": "image:1",
            "imageID": "",
            "ready": False,
            "started": False,
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": terminated},
        }
        status = {"phase": "Running", "containerStatuses": [container], "conditions": []}
        await api.patch("Pod", key.namespace, name, {"status": status}, "status")
        return str(made["metadata"]["uid"])

    return make


def condition(status: Any, name: str) -> Json:
    return next(c for c in status["conditions"] if c["type"] == name)


async def children(api: KubernetesApi, key: ServiceKey) -> dict[str, Json]:
    kinds = ("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding")
    lists = {kind: await api.list(kind, key.namespace, "serving.headway.dev/service=demo") for kind in kinds}
    return {f"{kind} {item['metadata']['name']}": item for kind, items in lists.items() for item in items}


async def _is_well(cluster: KubernetesCluster, take_pass: Any) -> bool:
    """Whether a pass that applies every child anew meets no problem."""
    cluster._applied.clear()
    outcome: Outcome = await take_pass()
    return outcome.problems == []


async def test_what_is_kept_in_memory_is_what_the_api_server_has(
    api: KubernetesApi,
    key: ServiceKey,
    cluster: KubernetesCluster,
    proxy: FaultProxy,
    take_pass: Any,
    make_pod: Any,
) -> None:
    async with await KubernetesApi.connect(proxy.kubeconfig) as watched:
        cache = KubernetesCache(watched, (), CACHED_KINDS)
        remembering = KubernetesCluster(watched, runtime_image="", gateway_image="", cache=cache)
        task = asyncio.create_task(cache.run())
        await cache.tried(30.0)
        assert cache.current_kinds() == CACHED_KINDS.keys() - OPTIONAL_KINDS.keys()

        async def is_the_same() -> bool:
            return await remembering.observe(key) == await cluster.observe(key)

        revision = (await take_pass()).status["revision"]["hash"]
        await make_pod("demo-x", revision, {"exitCode": 1, "reason": "Error", "message": "no such layer"})
        await eventually(is_the_same)
        assert [one.reason for one in (await remembering.observe(key)).replicas] == ["CrashLoopBackOff"]
        assert await remembering.fetch(key) == _without_managed_fields(await cluster.fetch(key))
        before = len(proxy.passed)
        await remembering.observe(key)
        await remembering.fetch(key)
        assert len(proxy.passed) == before  # nobody was asked
        proxy.go_away()
        proxy.come_back()
        await api.delete("Deployment", key.namespace, "demo-gateway")
        await eventually(is_the_same)
        await api.delete("InferenceService", key.namespace, "demo")

        async def is_gone() -> bool:
            return await remembering.fetch(key) is None

        await eventually(is_gone)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _without_managed_fields(service: Any) -> Json:
    return {**service, "metadata": {k: v for k, v in service["metadata"].items() if k != "managedFields"}}
