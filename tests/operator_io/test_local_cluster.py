import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway_operator.cluster.local import LocalCluster
from headway_operator.cluster.local_template import process_template
from headway_operator.cluster.local_workspace import Workspace
from headway_operator.errors import ClusterError
from headway_operator.state import ChildKey, Replica


async def replicas(cluster: LocalCluster, key: Any) -> tuple[Replica, ...]:
    return (await cluster.observe(key)).replicas


def backends(cluster: LocalCluster) -> dict[str, str]:
    table = json.loads(cluster.workspace.backends_file.read_text())
    assert table["version"] == 1
    return {entry["id"]: entry["state"] for entry in table["backends"]}


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


async def test_a_process_that_outlives_its_grace_is_killed(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, children: Any
) -> None:
    manifest = deployment(
        "demo-1a2b", environment={"STANDIN_IGNORE_TERM": "1"}, pod={"terminationGracePeriodSeconds": 1}
    )
    await local_cluster.apply(key, manifest)
    await eventually(lambda: backends(local_cluster))
    await local_cluster.scale(key, "demo-1a2b", 0)
    await eventually(lambda: not children())
    await eventually(lambda: not backends(local_cluster))


async def test_a_crashing_process_is_restarted_and_its_last_line_is_the_message(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any
) -> None:
    failure = "ValueError: config.json lacks hidden_size"
    await local_cluster.apply(key, deployment("demo-1a2b", environment={"STANDIN_FAIL": failure}))

    async def restarted() -> Replica | None:
        (replica,) = await replicas(local_cluster, key)
        return replica if replica.num_restarts >= 1 and replica.phase == "failed" else None

    replica = await eventually(restarted)
    assert replica.reason == "CrashLoopBackOff"
    assert replica.message == f"exited with status 1; last line: {failure}"
    assert failure in local_cluster.processes[0].tail()


async def test_a_killed_process_comes_back_on_a_new_port(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any
) -> None:
    await local_cluster.apply(key, deployment("demo-1a2b"))
    await eventually(lambda: backends(local_cluster))
    (process,) = local_cluster.processes
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await eventually(lambda: process.phase == "failed")
    assert not backends(local_cluster)  # written before the change is told
    assert process.snapshot().message.startswith("ended by SIGKILL")
    await eventually(lambda: backends(local_cluster))
    assert process.snapshot().num_restarts == 1
    assert process.snapshot().reason == ""


async def test_a_command_that_does_not_exist_is_named(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any
) -> None:
    await local_cluster.apply(key, deployment("demo-1a2b", container={"command": ["/nowhere/python"]}))

    async def failed() -> Replica | None:
        (replica,) = await replicas(local_cluster, key)
        return replica if replica.phase == "failed" else None

    replica = await eventually(failed)
    assert replica.reason == "CreateContainerError"
    assert "/nowhere/python" in replica.message


async def test_a_process_that_stops_being_ready_leaves_the_table_and_returns(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, tmp_path: Any
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    manifest = deployment(
        "demo-1a2b", environment={"STANDIN_READY_FILE": str(gate)}, container={"readinessProbe": probe}
    )
    await local_cluster.apply(key, manifest)
    await eventually(lambda: backends(local_cluster))
    gate.unlink()
    await eventually(lambda: not backends(local_cluster))
    (replica,) = await replicas(local_cluster, key)
    assert (replica.phase, replica.message) == ("starting", "answered 503: gate is shut")
    gate.touch()
    await eventually(lambda: backends(local_cluster))


async def test_a_process_that_is_no_longer_alive_is_restarted(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, tmp_path: Any
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    manifest = deployment(
        "demo-1a2b", environment={"STANDIN_HEALTH_FILE": str(gate)}, container={"livenessProbe": probe}
    )
    await local_cluster.apply(key, manifest)
    await eventually(lambda: backends(local_cluster))
    gate.unlink()
    (process,) = local_cluster.processes
    await eventually(lambda: process.phase == "failed")
    assert process.snapshot().reason == "LivenessProbeFailed"
    assert "/health failed 1 times in a row: answered 503: gate is shut" in process.snapshot().message


async def test_a_process_that_never_gets_ready_is_restarted_after_its_startup_time(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any, tmp_path: Any
) -> None:
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    manifest = deployment(
        "demo-1a2b",
        environment={"STANDIN_READY_FILE": str(tmp_path / "never")},
        container={"startupProbe": probe},
    )
    await local_cluster.apply(key, manifest)
    (process,) = local_cluster.processes
    await eventually(lambda: process.phase == "failed")
    assert "not ready within 1 s" in process.snapshot().message


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


async def test_a_cpu_limit_becomes_a_number_of_threads(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any
) -> None:
    await local_cluster.apply(
        key, deployment("demo-1a2b", container={"resources": {"limits": {"cpu": "1500m"}}})
    )
    await eventually(lambda: backends(local_cluster))
    said = local_cluster.processes[0].tail()
    assert "--num-threads 2" in said
    assert "OMP_NUM_THREADS=2" in said


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--tensor-parallel-size", "2"], 2),
        (["--tensor-parallel-size=3"], 1),
        (["-tp", "8"], 1),
        (["--tensor-parallel-size", "4", "--tensor-parallel-size", "1"], 5),
        (["--tensor-parallel-size", "many"], 5),
        (["--tensor-parallel-size"], 5),
        (["--tensor-parallel-size", "0"], 5),
    ],
)
def test_processes_that_share_a_model_share_its_cpu_limit(
    flags: list[str], want: int, deployment: Any
) -> None:
    resources = {"resources": {"limits": {"cpu": "4500m"}}}
    manifest = deployment("demo-1a2b", container=resources)
    manifest["spec"]["template"]["spec"]["containers"][0]["args"] = ["serve", "model", *flags]
    made = process_template(manifest, {})
    assert made.command[-2:] == ("--num-threads", str(want))
    assert made.environment["OMP_NUM_THREADS"] == str(want)


async def test_mounted_secrets_and_config_maps_are_files_at_the_rewritten_path(
    free_port: int, deployment: Any, key: Any, eventually: Any, tmp_path: Any
) -> None:
    volumes = [
        {"name": "keys", "secret": {"secretName": "api", "items": [{"key": "tokens", "path": "api-keys"}]}},
        {"name": "admin", "configMap": {"name": "demo-admin"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
    ]
    paths = {"keys": "/etc/keys", "admin": "/etc/admin", "tmp": "/tmp", "cache": "/nowhere/cache"}
    mounts = [{"name": name, "mountPath": path} for name, path in paths.items()]
    manifest = deployment(
        "demo-1a2b",
        container={
            "args": [
                "serve",
                "/tmp/model",
                "--api-key-file",
                "/etc/keys/api-keys",
                "--key=/etc/admin/public.pem",
            ],
            "env": [{"name": "CACHE", "value": "/nowhere/cache/files"}],
            "volumeMounts": mounts,
        },
        pod={"volumes": volumes},
    )
    cluster = LocalCluster(
        port=free_port, public_pem="", workspace_parent=tmp_path, secrets={"api": {"tokens": b"sesame\n"}}
    )
    async with cluster:
        with pytest.raises(ClusterError, match="no ConfigMap 'demo-admin'"):
            await cluster.apply(key, manifest)
        config_map = {"kind": "ConfigMap", "metadata": {"name": "demo-admin"}, "data": {"public.pem": "PEM"}}
        await cluster.apply(key, config_map)
        await cluster.apply(key, manifest)
        keys, admin = (cluster.workspace.mounts / "demo-1a2b" / name for name in ("keys", "admin"))
        assert (keys / "api-keys").read_text() == "sesame\n"
        assert (keys / "api-keys").stat().st_mode & 0o777 == 0o600
        assert (admin / "public.pem").read_text() == "PEM"
        template = cluster.processes[0].template
        want = ("serve", "/tmp/model", "--api-key-file", f"{keys}/api-keys", f"--key={admin}/public.pem")
        assert template.command[2:] == want
        assert template.environment["CACHE"] == str(keys.parent / "cache" / "demo-1a2b-0" / "files")
    assert not any(tmp_path.glob("headway-up-*"))


async def test_each_replica_has_an_empty_folder_of_its_own_until_it_goes(
    local_cluster: LocalCluster, deployment: Any, key: Any, eventually: Any
) -> None:
    """As pods have: files of a KV offload are one process's own. Started again it finds what it left."""
    flags = ["serve", "--port", "0", "--kv-offloading-disk-path", "/nowhere/offload"]
    manifest = deployment(
        "demo-1a2b",
        container={"args": flags, "volumeMounts": [{"name": "offload", "mountPath": "/nowhere/offload"}]},
        pod={"volumes": [{"name": "offload", "emptyDir": {}}]},
    )
    await local_cluster.apply(key, manifest)
    await local_cluster.scale(key, "demo-1a2b", 2)
    await eventually(lambda: list(backends(local_cluster).values()) == ["ready"] * 2)
    first, second = (Path(process.template.command[-1]) for process in local_cluster.processes)
    assert first.name == "demo-1a2b-0"
    assert second.name == "demo-1a2b-1"
    (first / "block").write_text("kept")
    assert not list(second.iterdir())
    process = local_cluster.processes[0]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await eventually(lambda: process.num_restarts == 1 and process.phase == "ready")
    assert (first / "block").read_text() == "kept"
    await local_cluster.scale(key, "demo-1a2b", 0)
    await eventually(lambda: not first.exists() and not second.exists())


async def test_variables_from_secrets_have_their_values(
    free_port: int, deployment: Any, key: Any, tmp_path: Any
) -> None:
    def variable(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": "hub", "key": name, **more}}}

    environment = [
        variable("HF_TOKEN"),
        variable("AWS_SESSION_TOKEN", optional=True),
        {"name": "PLAIN", "value": "x"},
    ]
    secrets = {"hub": {"HF_TOKEN": b"hf_sesame"}}
    cluster = LocalCluster(port=free_port, public_pem="", workspace_parent=tmp_path, secrets=secrets)
    async with cluster:
        await cluster.apply(key, deployment("demo-1a2b", container={"env": environment}))
        got = cluster.processes[0].template.environment
        assert got["HF_TOKEN"] == "hf_sesame"
        assert got["PLAIN"] == "x"
        assert "AWS_SESSION_TOKEN" not in got


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


async def test_files_to_judge_by_have_digests_that_follow_their_contents(key: Any, tmp_path: Any) -> None:
    maps = {"judge": {"a.txt": "one"}}
    file = tmp_path / "own.txt"
    file.write_text("one")
    names = ("configmap://judge/a.txt", "configmap://judge/b.txt", str(file), "/nowhere/in/a/volume")
    cluster = LocalCluster(port=0, public_pem="", workspace_parent=tmp_path, config_maps=maps)
    async with cluster:
        before = await cluster.digests(key, names)
        assert set(before) == {"configmap://judge/a.txt", str(file), "/nowhere/in/a/volume"}
        assert await cluster.digests(key, names) == before
        maps["judge"]["a.txt"] = "two"
        file.write_text("three")
        after = await cluster.digests(key, names)
        assert after["configmap://judge/a.txt"] != before["configmap://judge/a.txt"]
        assert after[str(file)] != before[str(file)]
        assert after["/nowhere/in/a/volume"] == before["/nowhere/in/a/volume"] == ""
