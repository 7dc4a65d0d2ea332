"""Deployments as processes of this machine: scaled, replaced, pruned, and all ended with their cluster."""

import asyncio
import json
import signal
import sys
from typing import Any

import psutil
import pytest
from tests.operator_io.local_replicas import backends, replicas

from headway_operator.cluster.local import LocalCluster
from headway_operator.cluster.local_workspace import Workspace
from headway_operator.errors import ClusterError
from headway_operator.state import ChildKey


async def test_a_deployment_becomes_one_ready_process_and_scales_both_ways(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, children: Any
) -> None:
    await local_cluster.apply(key, deployment("demo-1a2b"))

    async def num_ready() -> int:
        return sum(r.phase == "ready" for r in await replicas(local_cluster, key))

    async def is_ready(want: int) -> bool:
        return await num_ready() == want

    await eventually(lambda: is_ready(1))
    await local_cluster.scale(key, "demo-1a2b", 3)
    await eventually(lambda: is_ready(3))
    observed = await local_cluster.observe(key)
    assert [r.revision for r in observed.replicas] == ["1a2b"] * 3
    assert observed.revisions[0].replicas == 3
    assert backends(local_cluster) == {f"demo-1a2b-{i}": "ready" for i in range(3)}
    await local_cluster.scale(key, "demo-1a2b", 0)
    await eventually(lambda: not backends(local_cluster))
    await eventually(lambda: not children())


async def test_scale_down_stops_the_emptiest_first_and_says_draining_before_it_ends(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, children: Any
) -> None:
    manifest = deployment(
        "demo-1a2b", environment={"STANDIN_IGNORE_TERM": "1"}, pod={"terminationGracePeriodSeconds": 3}
    )
    await local_cluster.apply(key, manifest)
    await local_cluster.scale(key, "demo-1a2b", 3)
    await eventually(lambda: len(backends(local_cluster)) == 3)
    for name, cost in (("demo-1a2b-0", 5), ("demo-1a2b-1", 0), ("demo-1a2b-2", 9)):
        await local_cluster.set_deletion_cost(key, name, cost)
    await local_cluster.scale(key, "demo-1a2b", 2)
    await eventually(lambda: backends(local_cluster).get("demo-1a2b-1") == "draining")
    phases = {r.name: r.phase for r in await replicas(local_cluster, key)}
    assert phases == {"demo-1a2b-0": "ready", "demo-1a2b-1": "draining", "demo-1a2b-2": "ready"}
    await eventually(lambda: len(children()) == 2)
    await eventually(lambda: "demo-1a2b-1" not in backends(local_cluster))
    assert backends(local_cluster) == {"demo-1a2b-0": "ready", "demo-1a2b-2": "ready"}
    await local_cluster.close(at_once=True)


async def test_the_gateway_binds_the_given_port_and_is_replaced_when_its_template_changes(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, free_port: int, children: Any
) -> None:
    await local_cluster.apply(key, deployment("demo-gateway"))

    async def address() -> tuple[str, ...]:
        return (await local_cluster.observe(key)).gateway.addresses

    assert await eventually(address) == (f"http://127.0.0.1:{free_port}",)
    before = local_cluster.processes[0].name
    await local_cluster.apply(key, deployment("demo-gateway", environment={"CHANGED": "yes"}))
    await eventually(lambda: [p.name for p in local_cluster.processes] not in ([before], []))
    assert await eventually(address) == (f"http://127.0.0.1:{free_port}",)
    assert len(children()) == 1
    await local_cluster.apply(key, deployment("demo-gateway", environment={"CHANGED": "yes"}))
    assert len(local_cluster.processes) == 1


async def test_what_has_no_local_counterpart_is_refused_by_name(
    local_cluster: LocalCluster, deployment: Any, key: Any, children: Any
) -> None:
    field: dict[str, Any] = {
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    }
    with pytest.raises(ClusterError, match="env 'NODE' takes its value from fieldRef"):
        await local_cluster.apply(key, deployment("demo-1a2b", container=field))
    field["env"][0]["valueFrom"] = {}
    with pytest.raises(ClusterError, match="env 'NODE' takes its value from nothing"):
        await local_cluster.apply(key, deployment("demo-1a2b", container=field))
    started = {"lifecycle": {"postStart": {"exec": {"command": ["true"]}}}}
    for change, named in (({"workingDir": "/srv"}, "workingDir"), (started, "lifecycle.postStart")):
        with pytest.raises(ClusterError, match=f"{named} is not available in the local world"):
            await local_cluster.apply(key, deployment("demo-1a2b", container=change))
    aliases = {"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["api"]}]}
    with pytest.raises(ClusterError, match="hostAliases is not available in the local world"):
        await local_cluster.apply(key, deployment("demo-1a2b", pod=aliases))
    claim = {"volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]}
    with pytest.raises(ClusterError, match="volume 'cache' is the claim 'cache', which only a cluster has"):
        await local_cluster.apply(key, deployment("demo-1a2b", pod=claim))
    variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}}
    with pytest.raises(ClusterError, match=r"env 'HF_TOKEN' wants the key 'HF_TOKEN' of the Secret 'hub'"):
        await local_cluster.apply(key, deployment("demo-1a2b", container={"env": [variable]}))
    secret = {"volumes": [{"name": "keys", "secret": {"secretName": "api"}}]}
    with pytest.raises(ClusterError, match="there is no Secret 'api'; put it into the same file"):
        await local_cluster.apply(key, deployment("demo-1a2b", pod=secret))
    with pytest.raises(ClusterError, match="cannot scale 'demo-none'"):
        await local_cluster.scale(key, "demo-none", 1)
    assert not children()


async def test_prune_drains_the_processes_and_forgets_the_child(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, children: Any
) -> None:
    await local_cluster.apply(key, deployment("demo-1a2b"))
    await eventually(lambda: backends(local_cluster))
    await local_cluster.prune(key, ChildKey("Deployment", "demo-1a2b"))
    observed = await local_cluster.observe(key)
    assert observed.children == frozenset()
    assert observed.revisions == ()
    await eventually(lambda: not children())
    await local_cluster.prune(key, ChildKey("Deployment", "demo-1a2b"))


async def test_closing_leaves_no_process_and_no_file(
    free_port: int, deployment: Any, key: Any, eventually: Any, tmp_path: Any, children: Any
) -> None:
    cluster = LocalCluster(port=free_port, public_pem="", workspace_parent=tmp_path)
    async with cluster:
        manifests = (
            deployment("demo-gateway"),
            deployment("demo-1a2b", environment={"STANDIN_IGNORE_TERM": "1"}),
        )
        for manifest in manifests:
            await cluster.apply(key, manifest)
        await eventually(lambda: backends(cluster))
        closing = asyncio.create_task(cluster.close())
        # The gateway has gone, the replica ignores SIGTERM.
        await eventually(lambda: [process.name for process in cluster.processes] == ["demo-1a2b-0"])
        for manifest in manifests:  # by a pass that is still under way
            await cluster.apply(key, manifest)
        await cluster.scale(key, "demo-1a2b", 2)
        assert [process.name for process in cluster.processes] == ["demo-1a2b-0"], "nothing starts any more"
        assert len(children()) == 1
        await cluster.close(at_once=True)
        await closing
    assert not children()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
async def test_children_die_with_their_parent_and_its_folder_is_swept_later(
    signal_number: int, deployment: Any, eventually: Any, tmp_path: Any
) -> None:
    script = (
        "import asyncio, json, sys\n"
        "from headway_operator.cluster.local import LocalCluster\n"
        "from headway_operator.names import ServiceKey\n"
        "from pathlib import Path\n"
        "async def main():\n"
        "    cluster = LocalCluster(port=1, public_pem='', workspace_parent=Path(sys.argv[1]))\n"
        "    async with cluster:\n"
        "        await cluster.apply(ServiceKey('default', 'demo'), json.loads(sys.argv[2]))\n"
        "        while cluster.processes[0].phase != 'ready': await asyncio.sleep(0.05)\n"
        "        print(cluster.processes[0].pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    manifest = json.dumps(deployment("demo-1a2b"))
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path), manifest), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await asyncio.wait_for(parent.stdout.readline(), 60)))
    parent.send_signal(signal_number)  # no handler: the lifeline alone must do it
    await parent.wait()
    await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    (abandoned,) = tmp_path.glob("headway-up-*")
    living, later = Workspace(tmp_path), Workspace(tmp_path)
    assert not abandoned.exists()
    assert living.path.exists()
    living.remove()
    later.remove()
