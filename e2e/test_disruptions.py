"""What an administrator does to a cluster, under load, counted: not one request may fail.

Scale-downs, rollouts, evictions, a rotated key pair. `make e2e` does each a few times, `make e2e-full` 100
scale-downs and 20 rollouts. The tests share one service and build on each other.
"""

import json
import time
from collections.abc import Callable
from functools import partial

import aiohttp
import pytest

from e2e.conftest import OPERATOR_PODS
from e2e.disruption import (
    becomes_ready,
    fixed_service,
    gateway_pods,
    is_ready,
    lives,
    record,
    rolled_out,
    scaled,
    times,
    under_load,
)
from e2e.installation import SYSTEM_NAMESPACE, WHERE
from e2e.kubernetes import CallFailedError, Kubernetes, Object, eventually
from e2e.observed_service import NAME, NAMESPACE, runtime_pods
from headway_operator.cluster.secret import secret_values
from headway_operator.keys import HANDOVER_SECONDS, AdminKeys
from headway_operator.names import OPERATOR_KEY_SECRET, ServiceKey

SCALE_DOWNS = times("HEADWAY_E2E_SCALE_DOWNS", 10)
ROLLOUTS = times("HEADWAY_E2E_ROLLOUTS", 3)
MOST_REPLICAS = 4
ROTATION_SECONDS = 120.0  # the operator looks twice a minute, its passes and the kubelet every few seconds

pytestmark = pytest.mark.timeout(300 + 20 * SCALE_DOWNS + 60 * ROLLOUTS)


@pytest.fixture(scope="module")
def old_keys(installed: Kubernetes) -> tuple[AdminKeys, float]:
    """The pair before the Secret was deleted, and when it was."""
    before = stored_keys(installed)
    deleted_at = time.monotonic()
    installed.kubectl("delete", "secret", OPERATOR_KEY_SECRET, WHERE)
    return before, deleted_at


def stored_keys(kubernetes: Kubernetes) -> AdminKeys:
    values = secret_values(kubernetes.get("secret", OPERATOR_KEY_SECRET, SYSTEM_NAMESPACE))
    return AdminKeys.from_pem(values["private.pem"].decode())


async def test_a_service_with_two_gateways_gets_ready(installed: Kubernetes) -> None:
    installed.apply(fixed_service(installed, replicas=2, gateways=2))
    await becomes_ready(installed, 2)
    await eventually(
        "both gateways serve",
        60,
        lambda: len(pods := gateway_pods(installed)) == 2 and all(map(is_ready, pods)),
    )


async def test_no_request_fails_while_replicas_are_removed(
    installed: Kubernetes, url: str, old_keys: tuple[AdminKeys, float]
) -> None:
    removed = 0
    async with under_load(url) as load:
        while removed < SCALE_DOWNS:
            count = min(MOST_REPLICAS - 1, SCALE_DOWNS - removed)
            await scaled(installed, 1 + count)
            for left in range(count, 0, -1):
                await scaled(installed, left)
                removed += 1
    record("scale-downs", load, scale_downs=removed)
    assert [outcome.error for outcome in load.failures] == []


async def test_no_request_fails_while_templates_change(installed: Kubernetes, url: str) -> None:
    await scaled(installed, 2)
    async with under_load(url) as load:
        for number in range(ROLLOUTS):
            await rolled_out(installed, 2, str(number))
    record("rollouts", load, rollouts=ROLLOUTS)
    assert [outcome.error for outcome in load.failures] == []


async def test_evictions_take_one_pod_at_a_time_and_no_request_fails(installed: Kubernetes, url: str) -> None:
    """Of the replicas and of the gateways, by the Eviction API, as a node's drain does it."""
    evicted = 0
    async with under_load(url) as load:
        for find in (runtime_pods, gateway_pods):
            first, second = (pod["metadata"]["name"] for pod in find(installed))
            await eventually("one may go", 60, partial(evict, installed, first))
            evicted += 1
            with pytest.raises(CallFailedError, match="disruption budget"):
                evict(installed, second)
            await eventually(
                "another has come",
                120,
                partial(are_two_without, find, installed, first),
            )
        await becomes_ready(installed, 2)
    record("evictions", load, evictions=evicted)
    assert [outcome.error for outcome in load.failures] == []


def are_two_without(find: Callable[[Kubernetes], list[Object]], kubernetes: Kubernetes, gone: str) -> bool:
    pods = find(kubernetes)
    names = [pod["metadata"]["name"] for pod in pods]
    return len(pods) == 2 and all(map(is_ready, pods)) and gone not in names


def evict(kubernetes: Kubernetes, name: str) -> bool:
    """Raises CallFailedError where a budget forbids it."""
    metadata = {"name": name, "namespace": NAMESPACE}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    kubernetes.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(body))
    return True


async def test_the_admin_keys_are_rotated_without_a_restart(
    installed: Kubernetes, url: str, old_keys: tuple[AdminKeys, float]
) -> None:
    """The Secret was deleted before all of this; pods from before and after it take the new pair's tokens."""
    if not installed.has_pod_network:
        pytest.skip("the pods' addresses are not reached from here")
    old, deleted_at = old_keys
    pods = runtime_pods(installed) + gateway_pods(installed)
    before = lives(pods) | lives(installed.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS))
    await eventually("there is another pair", 60, lambda: stored_keys(installed).public_pem != old.public_pem)
    new = stored_keys(installed)
    addresses = [pod["status"]["podIP"] for pod in pods]
    deadline = time.monotonic() + ROTATION_SECONDS
    for address in addresses:
        while await admin_status(address, new) != 200:
            assert time.monotonic() < deadline, f"{address} does not know the new key"
    assert {await admin_status(address, AdminKeys.generate()) for address in addresses} == {401}
    seen = [await admin_status(address, old) for address in addresses]
    passed = time.monotonic() - deleted_at
    print(f"{passed:.0f} s after the deletion the old pair's tokens are answered {seen}")
    if passed < 2 * HANDOVER_SECONDS:
        assert set(seen) == {200}  # which the operator still signs with at first
    elif passed > 2 * HANDOVER_SECONDS + ROTATION_SECONDS:
        assert set(seen) == {401}
    after = installed.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS)
    assert lives(runtime_pods(installed) + gateway_pods(installed)) | lives(after) == before
    log = installed.kubectl("logs", WHERE, f"--selector={OPERATOR_PODS}", "--tail=-1")
    assert "the admin keys are others" in log
    assert "answered 401" not in log


async def admin_status(address: str, keys: AdminKeys) -> int:
    """What a pod answers to a token of this pair."""
    headers = {"Authorization": f"Bearer {keys.mint(ServiceKey(NAMESPACE, NAME), time.time())}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.get(f"http://{address}:8000/admin/sample", headers=headers) as response,
    ):
        return response.status
