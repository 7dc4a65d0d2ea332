"""What others change in a workload that is kept and not rendered is undone, and nothing else is written.

An operator that renders differently keeps what stands as it is; the stable revision beside a candidate is
kept likewise.
"""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e import api_objects as base
from e2e.conftest import eventually
from e2e.fault_proxy import FaultProxy
from headway_operator.cluster.kubernetes import CACHED_KINDS, KubernetesCluster
from headway_operator.cluster.kubernetes_api import MERGE, KubernetesApi
from headway_operator.cluster.kubernetes_applied import REAPPLY_SECONDS
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.cluster.kubernetes_paths import path_of
from headway_operator.keys import AdminKeys
from headway_operator.manifests.render import content_hash
from headway_operator.names import LAST_APPLIED_ANNOTATION
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

Json = dict[str, Any]
READY = base.status(ready=True, running=base.RUNNING) | {
    "podIP": "127.0.0.1",
    "podIPs": [{"ip": "127.0.0.1"}],  # refuses to be sampled, at once
}


class Operator:
    """Whose passes are taken one by one, behind a proxy that notes what they write."""

    def __init__(
        self, api: KubernetesApi, proxy: FaultProxy, key: ServiceKey, scraper: Scraper, keys: AdminKeys
    ) -> None:
        self.api, self.proxy, self.key, self.scraper, self.keys = api, proxy, key, scraper, keys
        self.now = time.time()
        self.carried = Carried()
        self.cache = KubernetesCache(api, (), CACHED_KINDS)
        self.cluster = KubernetesCluster(
            api,
            runtime_image="runtime:1",
            gateway_image="gateway:1",
            clock=lambda: self.now,
            cache=self.cache,
        )

    async def look(self, seconds: float = REAPPLY_SECONDS + 1) -> Outcome:
        """A pass in which nothing fails, so much later."""
        self.now += seconds
        manifest = await self.cluster.fetch(self.key)
        assert manifest is not None
        world = World(self.cluster, self.scraper, self.keys, lambda: self.now)
        outcome = await reconcile(world, manifest, self.carried)
        assert outcome.problems == []
        return outcome

    async def written(self, seconds: float = REAPPLY_SECONDS + 1) -> list[str]:
        """What a pass writes, the status and the checkpoint left out: METHOD KIND/NAME.

        What the API server refused, as others set the same fields, is none of it.
        """
        before = len(self.proxy.writes())
        await self.look(seconds)
        calls = [
            (one.method, one.path.split("?")[0].split("/"))
            for one in self.proxy.writes()[before:]
            if one.status < 400
        ]
        return [
            f"{method} {'/'.join(path[path.index(self.key.namespace) + 1 :])}"
            for method, path in calls
            if path[-1] not in ("status", "demo-memory", "events") and "events" not in path
        ]

    async def is_quiet(self) -> bool:
        return await self.written() == []


@pytest.fixture
def start(key: ServiceKey, proxy: FaultProxy) -> Any:
    """A fresh operator, which knows nothing but what the API server has."""
    keys = AdminKeys.generate()

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Operator]:
        async with (
            await KubernetesApi.connect(proxy.kubeconfig) as api,
            Scraper(keys, time.time) as scraper,
        ):
            operator = Operator(api, proxy, key, scraper, keys)
            task = asyncio.create_task(operator.cache.run())
            await operator.cache.tried(30.0)
            yield operator
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return running


async def deployment(api: KubernetesApi, key: ServiceKey, name: str) -> Json:
    found = await api.get("Deployment", key.namespace, name)
    assert found is not None
    return found


async def set_image(api: KubernetesApi, key: ServiceKey, name: str) -> None:
    """As `kubectl set image` does, in every container."""
    found = await deployment(api, key, name)
    containers = copy.deepcopy(found["spec"]["template"]["spec"]["containers"])
    for container in containers:
        container["image"] = "example.test/anything:1"
    body = {"spec": {"template": {"spec": {"containers": containers}}}}
    path = path_of("Deployment", key.namespace, name)
    await api._call("PATCH", path, query={"fieldManager": "kubectl-set"}, body=body, content_type=MERGE)


async def is_repaired(operator: Operator, api: KubernetesApi, before: Json) -> None:
    """Once the operator has heard of a change, one pass undoes it with one write, and the next ones none."""
    name = before["metadata"]["name"]
    changed = await deployment(api, operator.key, name)
    assert content_hash(changed["spec"]["template"]) != content_hash(before["spec"]["template"])

    async def has_heard() -> bool:
        _, held = operator.cache.get("Deployment", operator.key.namespace, name)
        return held is not None and held["metadata"]["generation"] == changed["metadata"]["generation"]

    await eventually(has_heard)
    assert await operator.written() == [f"PATCH deployments/{name}"]
    after = await deployment(api, operator.key, name)
    assert content_hash(after["spec"]["template"]) == content_hash(before["spec"]["template"])
    assert after["spec"]["replicas"] == before["spec"]["replicas"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    await eventually(operator.is_quiet)


async def test_an_upgraded_operator_undoes_what_others_change_in_what_it_keeps(
    api: KubernetesApi, key: ServiceKey, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as operator:
        outcome = await operator.look()
        names = [outcome.status["revision"]["name"], "demo-gateway"]
        await eventually(operator.is_quiet)
    before = [await deployment(api, key, name) for name in names]
    monkeypatch.setattr("headway_operator.manifests.pod.GRACE_MARGIN_SECONDS", 16)
    async with start() as upgraded:
        for _ in range(3):
            assert await upgraded.written() == [], "a newer operator rolls nothing, and writes nothing"
        for one in before:
            name = one["metadata"]["name"]
            assert (await deployment(api, key, name))["metadata"] == one["metadata"]
            await set_image(api, key, name)
            await is_repaired(upgraded, api, one)
    await set_image(api, key, names[0])
    async with start() as another:  # which has never applied it itself, and was away when it was changed
        assert await another.written() == [f"PATCH deployments/{names[0]}"]
    after = await deployment(api, key, names[0])
    assert content_hash(after["spec"]["template"]) == content_hash(before[0]["spec"]["template"])


async def test_the_stable_revision_beside_a_candidate_is_kept_as_it_was(
    api: KubernetesApi, key: ServiceKey, start: Any
) -> None:
    async with start() as operator:
        await ask_for(operator, replicas=1, slo=None)
        revision = (await operator.look()).status["revision"]
        made = base.pod(key, f"{revision['name']}-1", revision=revision["hash"])
        await api.create(made)
        await api.patch("Pod", key.namespace, made["metadata"]["name"], {"status": READY}, "status")
        await eventually(lambda: is_stable(operator, revision["name"]))
        await ask_for(operator, drainTimeoutSeconds=7)
        outcome = await operator.look()
        assert outcome.status["rollout"]["candidate"] not in ("", revision["name"])
        await eventually(operator.is_quiet)
        before = await deployment(api, key, revision["name"])
        await set_image(api, key, revision["name"])
        await is_repaired(operator, api, before)
        await base.no_pods(api, key)


async def ask_for(operator: Operator, **spec: Any) -> None:
    """Change the spec, and wait until the operator has heard of it."""
    namespace = operator.key.namespace
    changed = await operator.api.patch("InferenceService", namespace, "demo", {"spec": spec})
    assert changed is not None

    async def is_heard() -> bool:
        found = await operator.cluster.fetch(operator.key)
        return found is not None and found["metadata"]["generation"] == changed["metadata"]["generation"]

    await eventually(is_heard)


async def is_stable(operator: Operator, name: str) -> bool:
    outcome = await operator.look(1.0)
    return bool((outcome.status["rollout"].get("stable") or {}).get("name") == name)


async def test_what_a_version_without_the_annotation_left_is_given_one_and_rolls_nothing(
    api: KubernetesApi, key: ServiceKey, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        module = "headway_operator.cluster"
        earlier.setattr(f"{module}.kubernetes_children.with_last_applied", lambda manifest: manifest)
        earlier.setattr(f"{module}.kubernetes_applied.LAST_APPLIED_ANNOTATION", "")
        async with start() as operator:
            name = (await operator.look()).status["revision"]["name"]
            await eventually(operator.is_quiet)
    before = await deployment(api, key, name)
    assert LAST_APPLIED_ANNOTATION not in before["metadata"].get("annotations", {})
    async with start() as upgraded:
        assert sorted(await upgraded.written()) == [
            *(f"PATCH deployments/{one}" for one in sorted([name, "demo-gateway"])),
        ]
        await eventually(upgraded.is_quiet)
    after = await deployment(api, key, name)
    assert LAST_APPLIED_ANNOTATION in after["metadata"]["annotations"]
    assert after["spec"] == before["spec"]
