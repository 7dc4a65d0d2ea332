"""Processes of the local cluster: started again as they end or fail probes, with threads by their limit."""

import os
import signal
from typing import Any

import pytest
from tests.operator_io.local_replicas import backends, replicas

from headway_operator.cluster.local import LocalCluster
from headway_operator.cluster.local_template import process_template
from headway_operator.state import Replica


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
