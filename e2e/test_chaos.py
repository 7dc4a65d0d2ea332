"""Processes that are killed under load, and what clients notice of it: no more than what a process held.

What a killed replica had not begun to answer, the gateway sends to another one. `make e2e-full` kills more
often, and takes etcd away for 30 s.
"""

import asyncio
import random
import time

import pytest

from e2e.cluster import lifecycle, processes
from e2e.cluster.settings import read_settings
from e2e.conftest import OPERATOR_PODS
from e2e.disruption import (
    becomes_ready,
    fixed_service,
    gateway_pods,
    is_ready,
    lives,
    patch,
    record,
    scaled,
    serves,
    times,
    under_load,
)
from e2e.installation import SYSTEM_NAMESPACE
from e2e.kubernetes import Kubernetes, Object, eventually
from e2e.load import Load
from e2e.observed_service import runtime_pods, status

KILLS = times("HEADWAY_E2E_KILLS", 1)
ETCD_SECONDS = times("HEADWAY_E2E_ETCD_SECONDS", 5)
CONTAINERD_SECONDS = times("HEADWAY_E2E_CONTAINERD_SECONDS", 5)

pytestmark = pytest.mark.timeout(300 + 90 * KILLS + ETCD_SECONDS + CONTAINERD_SECONDS)


@pytest.fixture(scope="module", autouse=True)
def own_cluster(kubernetes: Kubernetes) -> None:
    """Nobody else's processes are killed."""
    if not kubernetes.has_pod_network:
        pytest.skip("the cluster is the user's own")


def restarts(pod: Object) -> int:
    return sum(one["restartCount"] for one in pod["status"]["containerStatuses"])


async def kill(kubernetes: Kubernetes, pod: Object) -> tuple[float, float]:
    """Every process of a pod, without a word; and wait until the kubelet has started it again.

    Before and after the killing, by the clock of `Outcome`.
    """
    begun_at = time.monotonic()
    killed = processes.kill_pod(read_settings(), pod["metadata"]["uid"])
    killed_at = time.monotonic()
    assert killed, "no process of the pod was found"
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]

    def is_back() -> bool:
        found = kubernetes.get("pod", name, namespace)
        return restarts(found) > restarts(pod) and is_ready(found)

    await eventually(f"{name} has started again", 180, is_back)
    return begun_at, killed_at


async def works_again(kubernetes: Kubernetes) -> None:
    """The operator does what it is told, and says so."""
    target = random.randint(500, 5000)
    patch(kubernetes, {"slo": {"ttftMilliseconds": target}})
    await eventually(
        "the new target is judged",
        120,
        lambda: status(kubernetes)["slo"]["ttftMilliseconds"].get("target") == target,
    )


def assert_lost_what_it_held(load: Load, kills: list[tuple[float, float]]) -> None:
    """Answers that were under way when a process was killed."""
    for outcome in load.failures:
        assert outcome.num_chunks > 0, f"not begun, and not sent to another: {outcome}"
        is_held = [outcome.sent_at <= killed and outcome.finished_at >= begun for begun, killed in kills]
        assert any(is_held), f"nothing was killed then: {outcome}"


async def test_a_service_gets_ready(installed: Kubernetes) -> None:
    installed.apply(fixed_service(installed, replicas=2, gateways=2))
    await becomes_ready(installed, 2)


async def test_a_killed_replica_takes_no_more_with_it_than_what_it_had_begun(
    installed: Kubernetes, url: str
) -> None:
    async with under_load(url) as load:
        kills = []
        for _ in range(KILLS):
            kills.append(await kill(installed, random.choice(runtime_pods(installed))))
            await serves(load)
    record("killed replicas", load, kills=KILLS)
    assert_lost_what_it_held(load, kills)


async def test_a_killed_gateway_takes_no_more_with_it_than_what_it_held(
    installed: Kubernetes, url: str
) -> None:
    """The other one serves on; clients that send again what got no answer, as they do, lose nothing else.

    Until the kubelet has seen the death, the Service leads half of them to the dead one: they try so long.
    """
    await eventually("both serve", 60, lambda: [*map(is_ready, gateway_pods(installed))] == [True, True])
    async with under_load(url, attempts=6) as load:
        kills = []
        for _ in range(KILLS):
            kills.append(await kill(installed, random.choice(gateway_pods(installed))))
            await serves(load)
    record("killed gateways", load, kills=KILLS)
    assert_lost_what_it_held(load, kills)


async def test_a_killed_operator_is_not_missed(installed: Kubernetes, url: str) -> None:
    before = lives(runtime_pods(installed) + gateway_pods(installed))
    async with under_load(url) as load:
        for _ in range(KILLS):
            [pod] = installed.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS)
            await kill(installed, pod)
            await works_again(installed)
    record("killed operators", load, kills=KILLS)
    assert [outcome.error for outcome in load.failures] == []
    assert lives(runtime_pods(installed) + gateway_pods(installed)) == before


async def test_nobody_is_lost_while_etcd_is_away(installed: Kubernetes, url: str) -> None:
    settings = read_settings()
    before = lives(runtime_pods(installed) + gateway_pods(installed))
    async with under_load(url) as load:
        assert processes.kill(settings, "etcd")
        await asyncio.sleep(ETCD_SECONDS)
        lifecycle.restart(settings, "etcd")
        await eventually("the API server is back", 60, lambda: installed.kubectl("get", "--raw=/readyz"))
        await works_again(installed)
    record("etcd away", load, seconds=ETCD_SECONDS)
    assert [outcome.error for outcome in load.failures] == []
    assert lives(runtime_pods(installed) + gateway_pods(installed)) == before


async def test_nobody_is_lost_while_containerd_is_away_and_pods_start_again_afterwards(
    installed: Kubernetes, url: str
) -> None:
    settings = read_settings()
    before = lives(runtime_pods(installed) + gateway_pods(installed))
    async with under_load(url) as load:
        assert processes.kill(settings, "containerd")
        await asyncio.sleep(CONTAINERD_SECONDS)
        lifecycle.restart(settings, "containerd")
        await scaled(installed, 3)
    record("containerd away", load, seconds=CONTAINERD_SECONDS)
    assert [outcome.error for outcome in load.failures] == []
    after = lives(runtime_pods(installed) + gateway_pods(installed))
    assert before.items() <= after.items()
