"""A rollout that fails, in real processes: paused, given up, and what served goes on serving throughout."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from headway_operator.local_service import LocalService, running_service

STANDIN = Path(__file__).with_name("standin_server.py")


def manifest(failure: str = "") -> dict[str, Any]:
    container = {
        "name": "runtime",
        "command": [sys.executable, str(STANDIN)],
        "env": [{"name": "STANDIN_FAIL", "value": failure}],
    }
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "replicas": 2,
            "rollout": {"progressDeadlineSeconds": 10},
            "drainTimeoutSeconds": 5,
            "template": {"spec": {"containers": [container]}},
        },
    }


def told(service: LocalService, kind: str) -> tuple[str, str, str]:
    conditions = service.status.get("conditions") or ()
    found = (c for c in conditions if c["type"] == kind)
    return next(((c["status"], c["reason"], c["message"]) for c in found), ("", "", ""))


async def test_a_failing_revision_is_given_up_and_what_served_never_stops(
    tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest()))
    async with running_service(file, port=free_port, interval_seconds=0.3) as service:
        await eventually(lambda: told(service, "Progressing")[1] == "Settled")
        before = {process.name for process in service.cluster.processes if process.revision}
        first = service.status["revision"]["name"]
        file.write_text(yaml.safe_dump(manifest("no such layer")))
        await eventually(lambda: "the rollout is paused" in told(service, "Progressing")[2])
        assert "no such layer" in told(service, "Progressing")[2]
        await eventually(lambda: told(service, "Degraded")[1] == "ProgressDeadlineExceeded")
        assert "no such layer" in told(service, "Degraded")[2]
        await eventually(lambda: {one.name for one in service.cluster.processes if one.revision} == before)
        assert told(service, "Ready")[:2] == ("True", "Serving")
        assert service.status["revision"]["name"] == first
        assert {one.snapshot().num_restarts for one in service.cluster.processes} == {0}
        file.write_text(yaml.safe_dump(manifest()))
        await eventually(lambda: told(service, "Degraded")[0] == "False")
        assert {one.name for one in service.cluster.processes if one.revision} == before
