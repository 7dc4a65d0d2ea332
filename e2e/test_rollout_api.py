"""Suspension and rollouts against a real API server without a node: what pods say decides, status remembers.

The tests do what the controllers and kubelets would: they make the pods that Deployments ask for, with the
status that each test is about.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from e2e import api_objects as base
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError
from headway_operator.keys import AdminKeys
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

Json = dict[str, Any]
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."


def unschedulable() -> Json:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": NO_ROOM,
    }
    return {"phase": "Pending", "conditions": [condition]}


def ready() -> Json:
    status: Json = base.status(ready=True, running=base.RUNNING)
    return status | {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}  # refuses to be sampled, at once


def crashing() -> Json:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 1m"}
    result: Json = base.status(restarts=4, last=base.CRASHED, waiting=waiting)
    return result


@dataclass
class Play:
    """One service on the API server, the operator's passes over it, and the pods there are."""

    api: KubernetesApi
    key: ServiceKey
    cluster: KubernetesCluster
    keys: AdminKeys
    scraper: Scraper
    now: float
    carried: Carried = field(default_factory=Carried)
    num_made: int = 0

    async def step(self, seconds: float = 0.1) -> Outcome:
        """A pass in which nothing fails."""
        outcome = await self.look(seconds)
        assert outcome.problems == []
        return outcome

    async def look(self, seconds: float = 0.1) -> Outcome:
        """A pass, whatever comes of it."""
        self.now += seconds
        manifest = await self.cluster.fetch(self.key)
        assert manifest is not None
        world = World(self.cluster, self.scraper, self.keys, lambda: self.now)
        return await reconcile(world, manifest, self.carried)

    async def ask_for(self, **spec: Any) -> None:
        assert (
            await self.api.patch("InferenceService", self.key.namespace, "demo", {"spec": spec}) is not None
        )

    def restart(self) -> None:
        """Another operator, of a later version, with nothing but what the API server has."""
        self.cluster = KubernetesCluster(self.api, runtime_image="runtime:2", gateway_image="gateway:2")
        self.carried = Carried()

    async def scales(self) -> dict[str, int]:
        """Replicas that each revision's Deployment asks for."""
        found = await self.api.list("Deployment", self.key.namespace)
        return {
            one["metadata"]["name"]: one["spec"]["replicas"]
            for one in found
            if not one["metadata"]["name"].endswith("-gateway")
        }

    async def pods(self, **statuses: list[Json]) -> None:
        """Have exactly these pods: statuses by the hash of the revision, prefixed with an underscore."""
        await base.no_pods(self.api, self.key)
        for name, many in statuses.items():
            for pod_status in many:
                self.num_made += 1
                made = base.pod(self.key, f"demo-{name[1:]}-{self.num_made}", revision=name[1:])
                await self.api.create(made)
                await self.api.patch(
                    "Pod", self.key.namespace, made["metadata"]["name"], {"status": pod_status}, "status"
                )


@pytest.fixture
async def play(api: KubernetesApi, key: ServiceKey, cluster: KubernetesCluster) -> AsyncIterator[Play]:
    """The service with two replicas wanted, both ready, and a first revision that is stable."""
    keys = AdminKeys.generate()
    async with Scraper(keys, time.time) as scraper:
        play = Play(api, key, cluster, keys, scraper, time.time())
        await play.ask_for(replicas=2, slo=None)  # nothing is measured here
        outcome = await play.step()
        await play.pods(**{f"_{outcome.status['revision']['hash']}": [ready(), ready()]})
        outcome = await play.step()
        assert outcome.status["rollout"]["stable"]["name"] == outcome.status["revision"]["name"]
        yield play


def told(outcome: Outcome, kind: str) -> tuple[str, str, str]:
    found = base.condition(outcome.status, kind)
    return found["status"], found["reason"], found["message"]


async def test_suspend_keeps_every_child_and_asks_for_no_replica(play: Play) -> None:
    (name,) = await play.scales()
    before = set(await base.children(play.api, play.key))
    await play.ask_for(suspend=True)
    outcome = await play.step()
    assert await play.scales() == {name: 0}
    assert set(await base.children(play.api, play.key)) == before
    assert told(outcome, "Ready")[:2] == ("False", "Suspended")
    assert told(outcome, "Progressing")[:2] == ("True", "RemovingReplicas")
    assert told(outcome, "ScalingActive")[:2] == ("False", "Suspended")
    await play.pods()
    outcome = await play.step()
    assert told(outcome, "Progressing")[:2] == ("False", "Suspended")
    assert told(outcome, "Degraded")[0] == "False"
    play.restart()
    await play.step()
    assert await play.scales() == {name: 0}
    await play.ask_for(suspend=False)
    await play.step()
    assert await play.scales() == {name: 2}, "the same revision, with as many replicas as before"


async def test_one_out_one_in_where_the_scheduler_finds_no_room(play: Play) -> None:
    (old,) = await play.scales()
    await play.ask_for(drainTimeoutSeconds=5)
    outcome = await play.step()
    new = outcome.status["revision"]["name"]
    old_hash, new_hash = (name.rpartition("-")[2] for name in (old, new))
    assert await play.scales() == {old: 2, new: 2}, "first a surge"
    await play.pods(**{f"_{old_hash}": [ready(), ready()], f"_{new_hash}": [unschedulable()] * 2})
    await play.step()
    assert (await play.scales())[old] == 2, "it may find room by itself in its first moments"
    outcome = await play.step(30.0)
    assert await play.scales() == {old: 1, new: 2}
    assert told(outcome, "Progressing")[:2] == ("True", "MakingRoom")
    assert "3 Insufficient nvidia.com/gpu" in told(outcome, "Progressing")[2]
    await play.pods(**{f"_{old_hash}": [ready()], f"_{new_hash}": [unschedulable()] * 2})
    await play.step(30.0)
    assert (await play.scales())[old] == 1, "nobody else goes before that one is made up for"
    await play.pods(**{f"_{old_hash}": [ready()], f"_{new_hash}": [ready(), unschedulable()]})
    await play.step(30.0)
    assert (await play.scales())[old] == 0
    await play.pods(**{f"_{new_hash}": [ready(), ready()]})
    outcome = await play.step()
    assert told(outcome, "Progressing")[:2] == ("False", "Settled")
    assert list(await play.scales()) == [new]


async def test_a_failing_revision_is_given_up_and_no_other_operator_tries_it_again(play: Play) -> None:
    (old,) = await play.scales()
    await play.ask_for(drainTimeoutSeconds=5, rollout={"progressDeadlineSeconds": 60})
    outcome = await play.step()
    new = outcome.status["revision"]["name"]
    old_hash, new_hash = (name.rpartition("-")[2] for name in (old, new))
    await play.pods(**{f"_{old_hash}": [ready(), ready()], f"_{new_hash}": [crashing()] * 2})
    outcome = await play.step()
    assert told(outcome, "Progressing")[:2] == ("False", "CrashLoopBackOff")
    assert "the rollout is paused, 2 replicas of older revisions serve" in told(outcome, "Progressing")[2]
    play.restart()  # the deadline is the API server's to remember
    outcome = await play.step(61.0)
    assert told(outcome, "Progressing")[:2] == ("False", "ProgressDeadlineExceeded")
    assert await play.scales() == {old: 2, new: 0}
    await play.pods(**{f"_{old_hash}": [ready(), ready()]})
    for _ in range(2):
        play.restart()
        outcome = await play.step(120.0)
        assert await play.scales() == {old: 2}
        status, reason, message = told(outcome, "Degraded")
        assert (status, reason) == ("True", "ProgressDeadlineExceeded")
        assert f"revision {new} was given up" in message
        assert "ValueError: no such layer" in message
        assert f"revision {old} serves" in message
    manifest = await play.cluster.fetch(play.key)
    assert manifest is not None
    assert manifest["status"]["rollout"]["failed"]["name"] == new
    events = {event["reason"] for event in await play.api.list("Event", play.key.namespace)}
    assert "ProgressDeadlineExceeded" in events
    await play.ask_for(drainTimeoutSeconds=7)
    outcome = await play.step()
    assert outcome.status["rollout"]["candidate"] == outcome.status["revision"]["name"]
    assert "failed" not in outcome.status["rollout"]


async def test_a_newer_operator_rolls_nothing_out(play: Play) -> None:
    before = await play.scales()
    children = await base.children(play.api, play.key)
    play.restart()
    for _ in range(3):
        outcome = await play.step(60.0)
    assert await play.scales() == before
    assert "candidate" not in outcome.status["rollout"]
    after = await base.children(play.api, play.key)
    for name in (name for name in children if name.startswith("Deployment")):
        assert after[name]["spec"]["template"] == children[name]["spec"]["template"]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        pytest.param({"rollout": {"canary": {}}}, None, id="a canary with its defaults"),
        pytest.param({"rollout": {"canary": {"steps": [1, 99]}}}, None, id="rising"),
        pytest.param({"rollout": {"canary": {"steps": [50, 5]}}}, "into rising order", id="falling"),
        pytest.param({"rollout": {"canary": {"steps": [100]}}}, "steps", id="all is no share"),
        pytest.param({"rollout": {"canary": {"steps": []}}}, "steps", id="no step"),
        pytest.param({"rollout": {"maxUnavailable": -1}}, "maxUnavailable", id="less than none"),
        pytest.param({"rollout": {"progressDeadlineSeconds": 5}}, "progressDeadlineSeconds", id="no time"),
        pytest.param({"scaling": {"minReplicas": 0, "idleSeconds": 60}}, None, id="may sleep"),
        pytest.param({"scaling": {"idleSeconds": 5}}, "idleSeconds", id="hardly idle"),
        pytest.param({"waiting": {"maxRequests": -1}}, "maxRequests", id="fewer than none"),
        pytest.param({"waiting": {"maxRequests": 0, "timeoutSeconds": 0}}, None, id="nobody waits"),
    ],
)
async def test_the_api_server_holds_rollouts_to_their_rules(
    api: KubernetesApi, spec: Json, complaint: str | None
) -> None:
    whole = {"model": {"source": "bundled://headway-tiny"}, "slo": {"ttftMilliseconds": 300}} | spec
    create: Callable[..., Awaitable[Any]] = base.created_dry
    if complaint is None:
        await create(api, whole)
        return
    with pytest.raises(ClusterError, match=complaint):
        await create(api, whole)


async def test_a_revision_that_the_api_server_refuses_leaves_the_load_to_the_one_that_serves(
    play: Play,
) -> None:
    (stable,) = await play.scales()
    # The operator's own rules let it pass; the API server's do not.
    await play.ask_for(replicas=4, template={"spec": {"dnsPolicy": "Nowhere"}})
    for _ in range(3):
        outcome = await play.look()
    assert await play.scales() == {stable: 4}
    told = {one["type"]: (one["status"], one["reason"]) for one in outcome.status["conditions"]}
    assert told["Progressing"] == ("False", "RevisionRefused")
    assert told["Degraded"][0] == "True"
    (progressing,) = (one for one in outcome.status["conditions"] if one["type"] == "Progressing")
    assert "dnsPolicy" in progressing["message"]

    await play.ask_for(template=None)
    for _ in range(3):
        outcome = await play.look()
    assert outcome.problems == []
    assert await play.scales() == {stable: 4}
