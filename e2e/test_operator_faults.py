"""The operator as a program on a real API server that misbehaves: it recovers by itself, and what it reads is
what is there.
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

from e2e.api_objects import children, make_deployment, pod
from e2e.conftest import eventually
from e2e.fault_proxy import FaultProxy
from e2e.operator_process import edit, generation, running_operator
from headway_operator.cluster.kubernetes import CACHED_KINDS, KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.commands.operator import MIN_LIVENESS_SECONDS
from headway_operator.errors import ThrottledError, UnavailableError
from headway_operator.names import OPTIONAL_KINDS
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
        before = await versions(api, key)
        proxy.go_away()
        await asyncio.sleep(AWAY_SECONDS)  # what is tested is that so much time passes
        assert not await operator.is_leading()
        assert (await operator.health())[0] == 200  # a restart would help nobody
        proxy.come_back()
        assert await versions(api, key) == before
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


async def versions(api: KubernetesApi, key: ServiceKey) -> dict[str, str]:
    """Of what the operator made, but for ConfigMaps: a checkpoint is written as time goes by."""
    made = await children(api, key)
    return {
        name: item["metadata"]["resourceVersion"]
        for name, item in made.items()
        if not name.startswith("ConfigMap ")
    }


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
