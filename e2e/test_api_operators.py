"""Two operators whose Leases are in two namespaces, over the same service: one of them writes.

Each is a process of its own behind a proxy of its own, which notes what it writes.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from e2e.conftest import eventually
from e2e.fault_proxy import FaultProxy
from e2e.operator_process import INTERVAL_SECONDS, OperatorProcess, edit, running_operator
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.names import OPERATOR_LABEL, OPERATOR_UNTIL_ANNOTATION
from headway_operator.reconcile import CHECKPOINT_SECONDS, COUNTING_PERIODS
from headway_operator.state import ServiceKey
from headway_operator.times import seconds, timestamp

REFUSAL = 'reason="OtherOperatorError"'
# Of several passes.
QUIET_SECONDS = 6 * INTERVAL_SECONDS


def written(proxy: FaultProxy) -> list[str]:
    """What it wrote of the service; not its own Lease and key."""
    return [one.path for one in proxy.writes() if "/secrets" not in one.path]


async def mark(api: KubernetesApi, key: ServiceKey) -> tuple[str, float]:
    """Who looks after the service, and until when that counts; nobody at first."""
    found: Any = await api.get("ConfigMap", key.namespace, "demo-memory")
    if found is None:
        return "", 0.0
    metadata = found["metadata"]
    return metadata["labels"][OPERATOR_LABEL], seconds(metadata["annotations"][OPERATOR_UNTIL_ANNOTATION])


async def has_passed(operator: OperatorProcess) -> bool:
    """Whether it leads, and has left the service alone in several passes."""
    if not await operator.is_leading():
        return False
    lines = [line for line in (await operator.metrics()).splitlines() if REFUSAL in line]
    return any("reconcile_errors_total" in line and float(line.split()[-1]) >= 3 for line in lines)


async def is_quiet(api: KubernetesApi, key: ServiceKey) -> bool:
    """Whether nothing of the service is written for a while, by anybody."""
    before = await versions(api, key)
    await asyncio.sleep(QUIET_SECONDS)
    return await versions(api, key) == before


async def versions(api: KubernetesApi, key: ServiceKey) -> dict[str, str]:
    """Of the service and everything under it."""
    kinds = ("InferenceService", "Deployment", "Service", "ServiceAccount", "ConfigMap", "Role", "Event")
    lists = [await api.list(kind, key.namespace) for kind in kinds]
    return {
        one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for several in lists for one in several
    }


async def test_an_operator_leaves_alone_what_one_with_another_lease_looks_after(
    api: KubernetesApi, key: ServiceKey, kubeconfig: Path
) -> None:
    elsewhere = f"{key.namespace}-laptop"
    await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": elsewhere}})
    with_lease_elsewhere = ("--admin-secret-namespace", elsewhere)
    async with FaultProxy(kubeconfig) as one, FaultProxy(kubeconfig) as two:
        async with running_operator(one.kubeconfig, key.namespace) as first:
            await eventually(first.is_leading)
            await eventually(lambda: _is_marked(api, key, key.namespace))
            assert (await mark(api, key))[1] > time.time() + COUNTING_PERIODS * CHECKPOINT_SECONDS - 60
            async with running_operator(two.kubeconfig, key.namespace, *with_lease_elsewhere) as second:
                await eventually(lambda: has_passed(second))
                await eventually(await edit(api, key, 3))
                assert written(two) == []
                assert REFUSAL not in await first.metrics()
                await eventually(lambda: is_quiet(api, key))  # nobody undoes anything of the other's
                assert written(two) == []
        assert second.output.count("OtherOperatorError") == 1, "said once"
        assert f"in namespace '{key.namespace}' looks after this service" in second.output
        assert f"Lease headway-operator of namespace {elsewhere} is sought" in second.output

        async with running_operator(two.kubeconfig, key.namespace, *with_lease_elsewhere) as second:
            await eventually(lambda: has_passed(second))
            assert written(two) == [], "the first is silent, not for long enough"
            await _have_been_silent(api, key)
            await eventually(lambda: _is_marked(api, key, elsewhere))
            await eventually(await edit(api, key, 2))
            writes = len(written(one))
            async with running_operator(one.kubeconfig, key.namespace) as first:
                await eventually(lambda: has_passed(first))
                await eventually(await edit(api, key, 4))
                assert len(written(one)) == writes, "the one that comes back leaves it to the other"


async def test_of_two_that_begin_at_once_one_goes_on(
    api: KubernetesApi, key: ServiceKey, kubeconfig: Path
) -> None:
    elsewhere = f"{key.namespace}-laptop"
    await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": elsewhere}})
    async with FaultProxy(kubeconfig) as one, FaultProxy(kubeconfig) as two:
        async with (
            running_operator(one.kubeconfig, key.namespace) as first,
            running_operator(two.kubeconfig, key.namespace, "--admin-secret-namespace", elsewhere) as second,
        ):

            async def silent() -> FaultProxy | None:
                resting = [await has_passed(first), await has_passed(second)]
                return {(True, False): one, (False, True): two}.get((resting[0], resting[1]))

            quiet: FaultProxy = await eventually(silent)
            await asyncio.sleep(QUIET_SECONDS)
            before = len(written(quiet))
            await eventually(await edit(api, key, 3))
            assert len(written(quiet)) == before


async def _is_marked(api: KubernetesApi, key: ServiceKey, lease_namespace: str) -> bool:
    return (await mark(api, key))[0] == lease_namespace


async def _have_been_silent(api: KubernetesApi, key: ServiceKey) -> None:
    """As if its operator had ended minutes ago."""
    annotations = {OPERATOR_UNTIL_ANNOTATION: timestamp(time.time() - 1)}
    assert await api.patch(
        "ConfigMap", key.namespace, "demo-memory", {"metadata": {"annotations": annotations}}
    )
