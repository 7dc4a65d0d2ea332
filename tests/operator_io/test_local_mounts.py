"""What pods mount, in the local cluster: files, folders and variables of processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.operator_io.local_replicas import backends

from headway_operator.cluster.local import LocalCluster
from headway_operator.errors import ClusterError


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
