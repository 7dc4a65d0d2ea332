"""The rules between fields, held by a real API server while no operator runs: dry runs, nothing is kept."""

from typing import Any

import pytest

from e2e.api_objects import created_dry
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError

Json = dict[str, Any]
TARGET = {"slo": {"ttftMilliseconds": 300}}
OFFICE = {"start": "0 8 * * MON-FRI", "end": "0 18 * * MON-FRI", "minReplicas": 2}


def at_times(*changes: Json, **scaling: Any) -> Json:
    """Autoscaled by a schedule of OFFICE with changes; None leaves a field out."""
    entries = [{**OFFICE, **change} for change in changes]
    schedule = [{name: value for name, value in one.items() if value is not None} for one in entries]
    return {**TARGET, "replicas": None, "scaling": {**scaling, "schedule": schedule}}


TWO_NODES = {"tensorParallelSize": 4, "nodesPerReplica": 2}
GPUS = {"limits": {"nvidia.com/gpu": 1}}
ADAPTER = {"name": "one", "source": "/adapter"}


def offloading(host_memory: str | int, limit: str | int, **more: Any) -> Json:
    return {"kvOffload": {"hostMemory": host_memory}, "resources": {"limits": {"memory": limit}}, **more}


def sleeping(**waiting: int) -> Json:
    return {**TARGET, "replicas": None, "scaling": {"minReplicas": 0}, "waiting": waiting}


CASES = [
    pytest.param(at_times({"timeZone": "Europe/Berlin"}, {"maxReplicas": 9}), None, id="a schedule"),
    pytest.param(at_times({"start": "0 8 * *"}), "schedule.*start", id="no time of cron"),
    pytest.param(at_times({"timeZone": "Mars/Olympus"}), "such as Europe/Berlin", id="no time zone"),
    pytest.param(at_times({"end": OFFICE["start"]}), "must differ", id="no length"),
    pytest.param(at_times({"minReplicas": None}), "set minReplicas, maxReplicas or both", id="no bound"),
    pytest.param(at_times({"maxReplicas": 1}), "lower one or raise the other", id="bounds upside down"),
    pytest.param(at_times({"minReplicas": 5}), "must not exceed scaling.maxReplicas", id="above all"),
    pytest.param(
        at_times({"minReplicas": None, "maxReplicas": 1}, minReplicas=2),
        "must not be less than scaling.minReplicas",
        id="below all",
    ),
    pytest.param(sleeping(), None, id="one that sleeps"),
    pytest.param(sleeping(maxRequests=0), "wakes the service", id="nobody may wait to wake it"),
    pytest.param(sleeping(timeoutSeconds=0), "wakes the service", id="nobody waits long enough"),
    pytest.param(sleeping(maxRequests=0) | {"replicas": 0}, None, id="a fixed number never sleeps"),
    pytest.param({"kvOffload": {"hostMemory": "8Gi"}}, None, id="KV offload"),
    pytest.param(
        {"kvOffload": {"hostMemory": "8Gi"}, "prefixCaching": False},
        "set prefixCaching",
        id="nothing to keep",
    ),
    pytest.param(offloading("8Gi", "16Gi"), None, id="room for host memory"),
    pytest.param(offloading(10**9, "1.5Gi"), None, id="bytes and a fraction"),
    pytest.param(offloading("1500m", "2"), None, id="quantities as odd as can be"),
    pytest.param(offloading("16Gi", "16Gi"), "lower kvOffload.hostMemory", id="no room for weights"),
    pytest.param(offloading("17G", 16 * 10**9), "lower kvOffload.hostMemory", id="more than the limit"),
    pytest.param(offloading("20Gi", "16Gi", **TWO_NODES), None, id="host memory of two nodes"),
    pytest.param(offloading("32Gi", "16Gi", **TWO_NODES), "on all nodesPerReplica", id="more than two have"),
    pytest.param({"lora": {"adapters": [ADAPTER]}}, None, id="an adapter"),
    pytest.param({"lora": {"adapters": [{**ADAPTER, "name": "dry"}]}}, "must differ", id="as the service"),
    pytest.param(
        {"lora": {"adapters": [ADAPTER]}, "model": {"source": "/a", "servedName": "one"}},
        "must differ",
        id="as the model",
    ),
    pytest.param({"slo": {"ttftMilliseconds": 300, "endToEndMilliseconds": 300}}, None, id="whole answers"),
    pytest.param(
        {"slo": {"ttftMilliseconds": 300, "endToEndMilliseconds": 299}},
        "no less than",
        id="shorter than one token",
    ),
    pytest.param({**TWO_NODES, "gpu": {"count": 2}, "device": "cuda"}, None, id="two nodes"),
    pytest.param({**TWO_NODES, "nodesPerReplica": 3}, "must divide", id="an odd number of nodes"),
    pytest.param({**TWO_NODES, "nodesPerReplica": 8}, "must divide", id="more nodes than processes"),
    pytest.param({**TWO_NODES, "gpu": {"count": 1}}, "raise gpu.count", id="too few GPUs on each node"),
    pytest.param({**TWO_NODES, "resources": GPUS}, "on each of nodesPerReplica", id="too small a limit"),
    pytest.param(
        {**TWO_NODES, "quantization": "int8", "quality": {"text": "bundled"}},
        "judges the model in one pod",
        id="judged on two nodes",
    ),
    pytest.param({"rollout": {"maxSurge": "25%"}}, None, id="a surge in percent"),
    pytest.param({"rollout": {"maxSurge": 0}}, None, id="no surge"),
    pytest.param({"rollout": {"maxSurge": "101%"}}, "maxSurge", id="more than all"),
    pytest.param({"rollout": {"maxSurge": 1001}}, "maxSurge", id="a large surge"),
    pytest.param({"rollout": {"maxSurge": -1}}, "maxSurge", id="less than none"),
    pytest.param({"rollout": {"maxSurge": "2"}}, "maxSurge", id="a number in quotes"),
    pytest.param(
        {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "no rollout could begin", id="nothing may move"
    ),
    pytest.param({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "no rollout", id="nor a percent"),
]


@pytest.mark.parametrize(("fields", "complaint"), CASES)
async def test_the_api_server_holds_the_rules(
    bare_api: KubernetesApi, fields: Json, complaint: str | None
) -> None:
    spec = {"model": {"source": "bundled://headway-tiny"}, "replicas": 1} | fields
    create = created_dry(bare_api, {name: value for name, value in spec.items() if value is not None})
    if complaint is None:
        await create
        return
    with pytest.raises(ClusterError, match=complaint):
        await create
