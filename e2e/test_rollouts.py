"""Rollouts that are judged, given up, and a service that sleeps, on a real cluster with users all the while.

The tests share one service and build on each other.
"""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from e2e.disruption import becomes_ready, fixed_service, patch, record, serves, under_load
from e2e.kubernetes import Kubernetes, Object, eventually
from e2e.load import Load, ttft_milliseconds
from e2e.observed_service import NAME, NAMESPACE, condition, runtime_pods, status

# Over seconds, two replicas that are alike differ by what else a busy machine does; over half a minute they
# hardly do, but for the slowest fifth of each one's answers.
HOLD_SECONDS, PERCENTILE = 30, 80
LOOSE_TTFT_MILLISECONDS = 10_000
# For what is to come up, on a machine that others use as well, and for what never will.
PATIENT_SECONDS, DEADLINE_SECONDS = 180, 20
IDLE_SECONDS = 10
WAKING_USERS = 8
REVISION = "serving.headway.dev/revision"
BROKEN_MODULE = "no_such_module"

pytestmark = pytest.mark.timeout(600)


def revisions(kubernetes: Kubernetes) -> dict[str, str]:
    """The hash of each replica's revision, by the uid of its pod."""
    pods = runtime_pods(kubernetes)
    return {pod["metadata"]["uid"]: pod["metadata"]["labels"][REVISION] for pod in pods}


def reasons(kubernetes: Kubernetes) -> set[str]:
    """Of every event about the service."""
    about = f"involvedObject.name={NAME},involvedObject.kind=InferenceService"
    found = kubernetes.kubectl(
        "get",
        "events",
        f"--namespace={NAMESPACE}",
        f"--field-selector={about}",
        "--output=jsonpath={.items[*].reason}",
    )
    return set(found.split())


async def test_a_service_that_serves_gets_a_stable_revision(installed: Kubernetes) -> None:
    wanted = fixed_service(installed, replicas=1, gateways=1)
    # Two replicas on a busy machine may well break the usual promise, and then nobody is promoted.
    wanted["spec"]["slo"] = {"ttftMilliseconds": LOOSE_TTFT_MILLISECONDS, "percentile": PERCENTILE}
    canary = {"steps": [50], "holdSeconds": HOLD_SECONDS, "minRequests": 5}
    wanted["spec"]["rollout"] = {"progressDeadlineSeconds": PATIENT_SECONDS, "canary": canary}
    installed.apply(wanted)
    await becomes_ready(installed, 1)
    await eventually("it is stable", 30, lambda: "stable" in status(installed).get("rollout", {}))


async def test_a_canary_takes_its_share_and_is_promoted_under_load(installed: Kubernetes, url: str) -> None:
    [before] = set(revisions(installed).values())
    async with under_load(url) as load:
        patch(installed, {"template": {"metadata": {"annotations": {"example.com/note": "canary"}}}})
        began = time.monotonic()
        await eventually("half of the requests go to it", PATIENT_SECONDS, partial(has_share, installed))
        told = f"both revisions serve meanwhile: {rollout(installed)}"
        assert set(revisions(installed).values()) > {before}, told
        await eventually("it is promoted", PATIENT_SECONDS, partial(is_gone, installed, before))
        assert time.monotonic() - began >= HOLD_SECONDS
        await becomes_ready(installed, 1)
    record("canaries", load, promoted=1)
    assert [outcome.error for outcome in load.failures] == []


def rollout(kubernetes: Kubernetes) -> dict[str, Any]:
    """What status says of it. Ends the test where the candidate was given up."""
    found: dict[str, Any] = status(kubernetes).get("rollout", {})
    if failed := found.get("failed"):
        pytest.fail(f"{failed['name']} was given up: {failed['reason']}: {failed['message']}")
    return found


def has_share(kubernetes: Kubernetes) -> bool:
    """Else an AssertionError that tells how far the rollout is."""
    told = rollout(kubernetes)
    assert told.get("weight") == 50, f"{told}, {condition(kubernetes, 'Progressing')}"
    return True


def is_gone(kubernetes: Kubernetes, revision: str) -> bool:
    """Else an AssertionError that tells how far the rollout is."""
    told = f"{rollout(kubernetes)}, {condition(kubernetes, 'Progressing')}"
    assert revision not in revisions(kubernetes).values(), told
    return True


async def test_a_revision_that_crashes_is_given_up_and_no_request_fails(
    installed: Kubernetes, url: str
) -> None:
    before = revisions(installed)
    async with under_load(url) as load:
        patch(
            installed,
            {
                "rollout": {"progressDeadlineSeconds": DEADLINE_SECONDS},
                "template": {"spec": {"containers": [broken_container(installed)]}},
            },
        )
        await eventually(
            "it is given up",
            DEADLINE_SECONDS + 150,
            lambda: "failed" in status(installed).get("rollout", {}),
        )
        await becomes_ready(installed, 1)
        assert revisions(installed) == before, "the pods that served go on"
        await serves(load)
    record("rollbacks", load, given_up=1)
    assert [outcome.error for outcome in load.failures] == []
    assert condition(installed, "Degraded").startswith("True")
    told = {entry["type"]: entry["message"] for entry in status(installed)["conditions"]}
    assert "was given up" in told["Degraded"]
    assert BROKEN_MODULE in told["Degraded"] or not installed.has_pod_network, told["Degraded"]
    assert "ProgressDeadlineExceeded" in reasons(installed)


def broken_container(kubernetes: Kubernetes) -> Object:
    """The replicas' container, with a program that ends at once."""
    template = kubernetes.get("inferenceservice", NAME, NAMESPACE)["spec"]["template"]
    [container] = template.get("spec", {}).get("containers") or [{"name": "runtime"}]
    command = container.get("command")
    return dict(container) | {"command": [*command[:-1], BROKEN_MODULE] if command else ["/bin/false"]}


async def test_a_service_falls_asleep_and_all_who_wake_it_are_served(installed: Kubernetes, url: str) -> None:
    """Without a canary: what changes here is no template, and the broken one has to go."""
    service = fixed_service(installed, replicas=1, gateways=1)
    del service["spec"]["replicas"]
    service["spec"]["scaling"] = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": IDLE_SECONDS}
    installed.apply(service)
    await eventually(
        "it sleeps",
        IDLE_SECONDS + 240,
        lambda: condition(installed, "Ready") == "True Asleep" and not runtime_pods(installed),
    )
    load = Load(url, NAME, ["What is 12 + 30?"], max_tokens=16)
    await load.start(0)
    woken_at = time.monotonic()
    await asyncio.gather(*(load.request(load.prompts[0]) for _ in range(WAKING_USERS)))
    waited = ttft_milliseconds(load.outcomes, woken_at - 1, time.monotonic())
    await load.stop()
    assert [outcome.error for outcome in load.failures] == []
    assert len(load.outcomes) == WAKING_USERS
    assert waited is not None
    record("wakings", load, woken=1, p95_ttft_milliseconds=round(waited))
    await eventually("a replica serves", 60, lambda: status(installed).get("readyReplicas", 0) >= 1)
