"""Replicas that span nodes, on a real API server with and without the kind that makes their groups of pods.

The tests do what LeaderWorkerSet's controller would: they make the pods of each group, labelled as it does.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e import api_objects as base
from e2e.cluster.definitions import LEADER_WORKER_SET as PUBLISHED
from e2e.cluster.definitions import definitions
from e2e.cluster.settings import read_settings
from e2e.conftest import CRD_PATH, eventually
from e2e.test_api_children import Clock
from e2e.test_rollout_api import Play, play, ready, told, unschedulable
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_discovery import ASK_AGAIN_SECONDS
from headway_operator.errors import ClusterError
from headway_operator.names import (
    COMPONENT_LABEL,
    GROUP_INDEX_LABEL,
    GROUP_SET_LABEL,
    LEADER_WORKER_SET,
    OPTIONAL_KINDS,
)

__all__ = ["play"]
Json = dict[str, Any]
SPANNING = {"tensorParallelSize": 4, "nodesPerReplica": 2, "device": "cuda", "gpu": {"count": 2}}


async def is_served(api: KubernetesApi) -> bool:
    """Listed among what the server has, too, which comes a moment later."""
    with contextlib.suppress(ClusterError):
        await api.list(LEADER_WORKER_SET, "default")
        return LEADER_WORKER_SET in await api.served_kinds(OPTIONAL_KINDS[LEADER_WORKER_SET])
    return False


async def is_gone(api: KubernetesApi, path: str) -> bool:
    return await api._call("GET", path, absent_is_none=True) is None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster(api: KubernetesApi, clock: Clock) -> KubernetesCluster:
    return KubernetesCluster(
        api,
        runtime_image="runtime:1",
        gateway_image="gateway:1",
        operator_namespace="headway-system",
        clock=clock,
    )


@pytest.fixture
async def definition(play: Play, api: KubernetesApi, clock: Clock) -> AsyncIterator[None]:
    """LeaderWorkerSet's own definition, while a test runs, and time enough for the operator to ask for it."""
    [published] = definitions(PUBLISHED, read_settings().cache)
    await api._call("POST", CRD_PATH, body=published)
    await eventually(lambda: is_served(api))
    clock.added += ASK_AGAIN_SECONDS
    yield
    path = f"{CRD_PATH}/{published['metadata']['name']}"
    await api._call("DELETE", path)
    await eventually(lambda: is_gone(api, path))


async def groups_of(play: Play) -> list[Json]:
    return await play.api.list(LEADER_WORKER_SET, play.key.namespace)


async def make_group(play: Play, made: Json, leader_status: Json, worker_status: Json) -> None:
    """Both pods of group 0, out of the templates, which the API server takes as pods without a complaint."""
    name, group = made["metadata"]["name"], made["spec"]["leaderWorkerTemplate"]
    for pod_name, stateful_set, template, status in (
        (f"{name}-0", name, group["leaderTemplate"], leader_status),
        (f"{name}-0-1", f"{name}-0", group["workerTemplate"], worker_status),
    ):
        labels = {**template["metadata"]["labels"], GROUP_SET_LABEL: name, GROUP_INDEX_LABEL: "0"}
        await play.api.delete("Pod", play.key.namespace, pod_name)
        metadata = {"name": pod_name, "namespace": play.key.namespace, "labels": labels}
        metadata |= base.owned_by("StatefulSet", stateful_set)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        path = f"/api/v1/namespaces/{play.key.namespace}/pods"
        await play.api._call("POST", path, query={"fieldValidation": "Strict"}, body=pod)
        await play.api.patch("Pod", play.key.namespace, pod_name, {"status": status}, "status")


async def remove_group(play: Play, name: str) -> None:
    for pod in (f"{name}-0", f"{name}-0-1"):
        path = f"/api/v1/namespaces/{play.key.namespace}/pods/{pod}"
        await play.api._call("DELETE", path, query={"gracePeriodSeconds": "0"}, absent_is_none=True)


async def test_without_the_kind_it_is_refused_and_what_serves_goes_on(play: Play) -> None:
    (serving,) = await play.scales()
    await play.ask_for(**SPANNING)
    outcome = await play.look()
    status, reason, message = told(outcome, "Degraded")
    assert (status, reason) == ("True", "LeaderWorkerSetMissing")
    assert "install LeaderWorkerSet" in message
    assert "stays in force" in message
    assert await play.scales() == {serving: 2}


async def test_a_group_is_a_replica_and_follows_what_is_wanted(play: Play, definition: None) -> None:
    (single,) = await play.scales()
    await play.ask_for(**SPANNING, replicas=1)
    await play.step()  # one of the two that serve is one too many
    outcome = await play.step()
    [made] = await groups_of(play)
    name = made["metadata"]["name"]
    assert name == outcome.status["revision"]["name"] != single
    assert made["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert made["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert made["spec"]["replicas"] == 1
    assert single in await play.scales(), "what serves stays until the group is ready"

    # The leader waits for a worker that no node has room for; the replica says so.
    await make_group(play, made, base.status(running=base.RUNNING), unschedulable())
    outcome = await play.step(20)
    assert outcome.status["replicas"] == 3, "two single ones and the group, whose worker is no replica"
    assert told(outcome, "Progressing")[1] == "MakingRoom"
    assert f"{name}-0-1: not enough nvidia.com/gpu on any node" in told(outcome, "Progressing")[2]

    await remove_group(play, name)
    await base.no_pods(play.api, play.key)
    await make_group(play, made, ready(), ready())
    outcome = await play.step()
    outcome = await play.step()
    assert told(outcome, "Progressing")[1] == "Settled"
    assert (outcome.status["readyReplicas"], outcome.status["replicas"]) == (1, 1)
    assert await play.scales() == {}, "the single ones are pruned"

    await play.ask_for(replicas=3)
    await play.step()
    assert [one["spec"]["replicas"] for one in await groups_of(play)] == [3]

    # Nothing is written again that nobody touched, and an upgrade of the operator rolls nothing.
    [before] = await groups_of(play)
    play.restart()
    outcome = await play.step()
    [after] = await groups_of(play)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert outcome.status["revision"]["runtimeImage"] == "runtime:1"

    # Back on one node: a Deployment again, and the group goes once that serves.
    await play.ask_for(nodesPerReplica=None, tensorParallelSize=2, replicas=1)
    await play.step()  # groups that serve nobody go first
    outcome = await play.step()
    new = outcome.status["revision"]
    assert await play.scales() == {new["name"]: 1}
    assert [one["spec"]["replicas"] for one in await groups_of(play)] == [1]
    await play.pods(**{f"_{new['hash']}": [ready()]})
    await remove_group(play, name)
    for _ in range(3):
        outcome = await play.step()
    assert await groups_of(play) == []
    assert told(outcome, "Progressing")[1] == "Settled"


async def test_workers_are_covered_by_policy_and_budget(play: Play, definition: None) -> None:
    await play.ask_for(**SPANNING)
    await play.step()
    policy = await play.api.get("NetworkPolicy", play.key.namespace, "demo")
    budget = await play.api.get("PodDisruptionBudget", play.key.namespace, "demo")
    assert policy is not None
    assert budget is not None
    for selector in (policy["spec"]["podSelector"], budget["spec"]["selector"]):
        [expression] = selector["matchExpressions"]
        assert (expression["key"], "worker" in expression["values"]) == (COMPONENT_LABEL, True)
