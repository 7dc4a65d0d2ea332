"""Minutes of disturbance under a steady load: replicas lost, gateways rolled, the operator replaced.

`make e2e-full` runs it; the usual run has no time for it. One service keeps its users while everything
around it is replaced, and not one of their requests may fail.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Awaitable, Callable

import pytest

from e2e.conftest import OPERATOR_PODS
from e2e.installation import WHERE
from e2e.kubernetes import Kubernetes, eventually
from e2e.load import Load, ttft_milliseconds
from e2e.observed_service import (
    CHILD_KINDS,
    NAME,
    NAMESPACE,
    SERVICE_LABEL,
    condition,
    manifest,
    runtime_pods,
    status,
)

SECONDS_VARIABLE = "HEADWAY_E2E_CAMPAIGN_SECONDS"
SECONDS = float(os.environ.get(SECONDS_VARIABLE, "0"))
PAUSE_SECONDS = 5.0
IN_NAMESPACE = f"--namespace={NAMESPACE}"
GATEWAY = f"{SERVICE_LABEL},serving.headway.dev/component=gateway"

pytestmark = [
    pytest.mark.skipif(not SECONDS, reason=f"takes minutes: make e2e-full, or set {SECONDS_VARIABLE}"),
    pytest.mark.timeout(SECONDS + 900),
]


def patch(kubernetes: Kubernetes, spec: dict[str, object]) -> None:
    text = json.dumps({"spec": spec})
    kubernetes.kubectl("patch", "inferenceservice", NAME, IN_NAMESPACE, "--type=merge", f"--patch={text}")


async def replicas_are_ready(kubernetes: Kubernetes, count: int) -> None:
    await eventually(
        f"{count} replicas are ready", 240, lambda: status(kubernetes).get("readyReplicas") == count
    )


async def replicas_exist(kubernetes: Kubernetes, count: int) -> None:
    await eventually(f"{count} replicas exist", 240, lambda: len(runtime_pods(kubernetes)) == count)


async def lose_a_replica(kubernetes: Kubernetes) -> None:
    lost = random.choice(runtime_pods(kubernetes))["metadata"]["name"]
    kubernetes.kubectl("delete", "pod", lost, IN_NAMESPACE, "--wait=false")
    await eventually(
        "the lost replica is gone",
        240,
        lambda: lost not in [pod["metadata"]["name"] for pod in runtime_pods(kubernetes)],
    )
    await replicas_are_ready(kubernetes, 2)


async def roll_the_gateway(kubernetes: Kubernetes) -> None:
    """Another drain time is another argument of the gateway, and so another pod."""
    before = {pod["metadata"]["uid"] for pod in kubernetes.list("pods", NAMESPACE, GATEWAY)}
    seconds = kubernetes.get("inferenceservice", NAME, NAMESPACE)["spec"].get("drainTimeoutSeconds", 60)
    patch(kubernetes, {"drainTimeoutSeconds": 30 + (seconds - 29) % 30})
    await eventually(
        "the gateway is another",
        240,
        lambda: (
            (pods := kubernetes.list("pods", NAMESPACE, GATEWAY))
            and not before & {pod["metadata"]["uid"] for pod in pods}
        ),
    )
    await replicas_are_ready(kubernetes, 2)


async def replace_the_operator(kubernetes: Kubernetes) -> None:
    written_at = status(kubernetes)["updatedAt"]
    kubernetes.kubectl("delete", "pod", WHERE, f"--selector={OPERATOR_PODS}")
    await eventually(
        "a new operator writes a status", 240, lambda: status(kubernetes)["updatedAt"] > written_at
    )


async def add_a_replica_and_take_it_back(kubernetes: Kubernetes) -> None:
    for count in (3, 2):
        kubernetes.kubectl("scale", "inferenceservice", NAME, f"--replicas={count}", IN_NAMESPACE)
        await replicas_exist(kubernetes, count)
        await replicas_are_ready(kubernetes, count)


async def served_for_a_while(load: Load) -> None:
    """Until requests that were sent after the disturbance have ended, and a pause has passed."""
    since = time.monotonic()
    await eventually(
        "the load goes on", 120, lambda: any(outcome.sent_at > since for outcome in load.outcomes)
    )
    await asyncio.sleep(PAUSE_SECONDS)


async def edit_the_target(kubernetes: Kubernetes) -> None:
    milliseconds = random.randint(600, 2000)
    patch(kubernetes, {"slo": {"ttftMilliseconds": milliseconds}})
    await eventually(
        "the new target is judged",
        120,
        lambda: status(kubernetes)["slo"]["ttftMilliseconds"].get("target") == milliseconds,
    )


DISTURBANCES: tuple[Callable[[Kubernetes], Awaitable[None]], ...] = (
    lose_a_replica,
    roll_the_gateway,
    replace_the_operator,
    add_a_replica_and_take_it_back,
    edit_the_target,
)


async def test_no_request_fails_while_everything_around_is_replaced(installed: Kubernetes) -> None:
    wanted = manifest(installed)
    wanted["spec"]["replicas"] = 2
    installed.apply(wanted)
    await eventually("the service is Ready", 240, lambda: condition(installed, "Ready").startswith("True"))
    await replicas_are_ready(installed, 2)
    started_at = time.monotonic()
    with installed.service_url(NAME, NAMESPACE) as url:
        load = Load(f"{url}/v1", NAME, ["Count from 1 to 20.", "What is 12 + 30?"], max_tokens=64)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(load.stop)
            await load.start(4)
            for disturb in itertools.cycle(DISTURBANCES):
                if time.monotonic() - started_at > SECONDS:
                    break
                begun_at = time.monotonic()
                await disturb(installed)
                name = disturb.__name__.replace("_", " ")
                print(
                    f"{begun_at - started_at:6.1f} s  {name}: {time.monotonic() - begun_at:.1f} s, "
                    f"{len(load.outcomes)} requests so far, {len(load.failures)} failed",
                    flush=True,
                )
                await served_for_a_while(load)
    p95 = ttft_milliseconds(load.outcomes, started_at, time.monotonic())
    print(f"{len(load.outcomes)} requests in {time.monotonic() - started_at:.0f} s, P95 TTFT {p95:.0f} ms")
    assert [outcome.error for outcome in load.failures] == []
    assert len(load.outcomes) == load.sent
    installed.kubectl("delete", "inferenceservice", NAME, IN_NAMESPACE, "--timeout=60s")
    await eventually(
        "its children are gone", 120, lambda: not installed.list(CHILD_KINDS, NAMESPACE, SERVICE_LABEL)
    )
