"""A service under a steady load, what is done to it, and the count of what came of it.

How often a thing is done is told by the environment: `make e2e` does each a few times, `make e2e-full` as
often as the numbers in `e2e/results/` say.
"""

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from e2e.kubernetes import Kubernetes, Object, eventually
from e2e.load import Load
from e2e.observed_service import (
    NAME,
    NAMESPACE,
    SERVICE_LABEL,
    condition,
    manifest,
    runtime_pods,
    status,
)

IN_NAMESPACE = f"--namespace={NAMESPACE}"
GATEWAY_PODS = f"{SERVICE_LABEL},serving.headway.dev/component=gateway"
RESULTS_VARIABLE = "HEADWAY_E2E_RESULTS"
USERS = 4
PROMPTS = ["Count from 1 to 20.", "What is 12 + 30?", "Tell me a story."]
CHANGE_SECONDS = 240.0


def times(variable: str, otherwise: int) -> int:
    """How often something is to be done."""
    return int(os.environ.get(variable) or otherwise)


def fixed_service(kubernetes: Kubernetes, replicas: int, gateways: int) -> Object:
    """Replicas that start as fast as the machine can, and a promise that stands in nobody's way."""
    wanted = manifest(kubernetes)
    del wanted["spec"]["scaling"]
    wanted["spec"] |= {
        "replicas": replicas,
        "gateway": {"replicas": gateways},
        "drainTimeoutSeconds": 30,
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
    }
    return wanted


async def becomes_ready(kubernetes: Kubernetes, replicas: int) -> None:
    """So many replicas serve, and no pod of another revision, or that leaves, is left."""

    def is_so() -> bool:
        found = status(kubernetes)
        return (
            condition(kubernetes, "Ready").startswith("True")
            and found.get("readyReplicas") == replicas
            and len(runtime_pods(kubernetes)) == replicas
        )

    await eventually(f"{replicas} replicas serve", CHANGE_SECONDS, is_so)


async def scaled(kubernetes: Kubernetes, replicas: int) -> None:
    """By the scale subresource."""
    kubernetes.kubectl("scale", "inferenceservice", NAME, f"--replicas={replicas}", IN_NAMESPACE)
    await becomes_ready(kubernetes, replicas)


async def rolled_out(kubernetes: Kubernetes, replicas: int, note: str) -> None:
    """Another template takes the place of the one that serves."""
    before = {pod["metadata"]["uid"] for pod in runtime_pods(kubernetes)}
    patch(kubernetes, {"template": {"metadata": {"annotations": {"example.com/note": note}}}})

    def are_others() -> bool:
        return not before & {pod["metadata"]["uid"] for pod in runtime_pods(kubernetes)}

    await eventually("every replica is another", CHANGE_SECONDS, are_others)
    await becomes_ready(kubernetes, replicas)


def patch(kubernetes: Kubernetes, spec: Object) -> None:
    text = json.dumps({"spec": spec})
    kubernetes.kubectl("patch", "inferenceservice", NAME, IN_NAMESPACE, "--type=merge", f"--patch={text}")


def gateway_pods(kubernetes: Kubernetes) -> list[Object]:
    """Those that stay."""
    pods = kubernetes.list("pods", NAMESPACE, GATEWAY_PODS)
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def is_ready(pod: Object) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ())
    )


def lives(pods: list[Object]) -> dict[str, int]:
    """Restarts by uid: what stays the same where nobody was disturbed."""
    return {
        pod["metadata"]["uid"]: sum(one["restartCount"] for one in pod["status"]["containerStatuses"])
        for pod in pods
    }


@contextlib.asynccontextmanager
async def under_load(url: str, attempts: int = 1) -> AsyncIterator[Load]:
    """Users who are served before it begins; at its end every request has had its answer."""
    load = Load(url, NAME, PROMPTS, max_tokens=64, attempts=attempts)
    try:
        await load.start(USERS)
        await serves(load)
        yield load
        await serves(load)
    finally:
        await load.stop()
    assert len(load.outcomes) == load.sent


async def serves(load: Load) -> None:
    """Requests that are sent from now on are answered, as many as there are users."""
    since = time.monotonic()

    def has_answered() -> bool:
        answered = [one for one in load.outcomes if one.sent_at > since and not one.error]
        return len(answered) >= USERS

    await eventually("the load is served", 120, has_answered)


def record(name: str, load: Load, **counts: Any) -> None:
    """Say what was done and what became of the requests, and keep it where the environment says.

    Each entry says of which commit, on what and when: a file may hold entries of several runs.
    """
    result = counts | {"requests": load.sent, "failed": len(load.failures)}
    print(f"{name}: {json.dumps(result)}", flush=True)
    if path := os.environ.get(RESULTS_VARIABLE):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known | {name: result | conditions()}, indent=1) + "\n")


def conditions() -> dict[str, str]:
    """What was tested, on what machine and when (UTC)."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "commit": git.stdout.strip() or "unknown",
        "machine": f"{os.cpu_count()} cores, {pages * page / 2**30:.0f} GiB, {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
    }
