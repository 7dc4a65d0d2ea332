"""The Lease on a real API server: of two operators, whatever happens to one, never both write."""

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from e2e.conftest import eventually
from e2e.fault_proxy import FaultProxy, Passed
from e2e.operator_process import OperatorProcess, edit, running_operator
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.errors import ClusterError, NotLeadingError
from headway_operator.state import ServiceKey

LEASE_SECONDS, MARGIN_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 3.0, 1.0, 0.3, 0.1


@contextlib.asynccontextmanager
async def writer(proxy: FaultProxy, key: ServiceKey, name: str) -> AsyncIterator[Lease]:
    """An operator reduced to what writes: as fast as its Lease allows."""
    async with await KubernetesApi.connect(proxy.kubeconfig) as api:
        lease = Lease(
            api,
            key.namespace,
            name,
            lease_seconds=LEASE_SECONDS,
            margin_seconds=MARGIN_SECONDS,
            renew_seconds=RENEW_SECONDS,
            retry_seconds=RETRY_SECONDS,
        )
        guarded = api.guarded(lambda: lease.is_held)
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "written", "namespace": key.namespace},
        }

        async def write() -> None:
            count = 0
            while True:
                count += 1
                # An API server that is away, and a Lease that is not held, are what this is about.
                with contextlib.suppress(NotLeadingError, ClusterError):
                    await guarded.apply({**config_map, "data": {"by": f"{name} {count}"}}, force=True)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(lease.run()), asyncio.create_task(write())]
        try:
            yield lease
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def spans(proxies: dict[str, FaultProxy]) -> list[tuple[str, Passed, Passed]]:
    """Who wrote, in turns: name, first and last write of each turn."""
    everything = sorted(
        ((one.at, name, one) for name, proxy in proxies.items() for one in proxy.writes()), key=lambda w: w[0]
    )
    turns: list[tuple[str, Passed, Passed]] = []
    for _, name, one in everything:
        if turns and turns[-1][0] == name:
            turns[-1] = (name, turns[-1][1], one)
        else:
            turns.append((name, one, one))
    return turns


async def test_a_leader_that_is_cut_off_has_stopped_before_another_writes(
    key: ServiceKey, kubeconfig: Path
) -> None:
    async with FaultProxy(kubeconfig) as one, FaultProxy(kubeconfig) as two:
        proxies = {"one": one, "two": two}
        async with writer(one, key, "one") as first:
            await eventually(lambda: bool(one.writes()))
            async with writer(two, key, "two") as second:
                for cut, left in ((one, two), (two, one), (one, two)):
                    before = len(left.writes())
                    # Only the Lease is cut off: what the holder writes would still get through.
                    cut.answer = lambda request: (
                        web.Response(status=503) if "/leases" in request.path else None
                    )
                    await eventually(functools.partial(_has_more, left, before + 3))
                    cut.answer = lambda request: None
                assert not (first.is_held and second.is_held)
        turns = spans(proxies)
        assert [name for name, _, _ in turns] == ["one", "two", "one", "two"]
        for (_, _, last), (_, begin, _) in pairwise(turns):
            assert last.ended_at < begin.at


async def test_a_lease_that_another_takes_by_force_ends_the_writing(
    api: KubernetesApi, key: ServiceKey, proxy: FaultProxy
) -> None:
    async with writer(proxy, key, "one") as lease:
        await eventually(lambda: bool(proxy.writes()))
        body = {"spec": {"holderIdentity": "somebody"}}
        await api.patch("Lease", key.namespace, "headway-operator", body)
        await eventually(lambda: not lease.is_held)
        assert time.monotonic() - proxy.writes()[-1].at < LEASE_SECONDS
        lost_at = time.monotonic()
        guarded = api.guarded(lambda: lease.is_held)
        with pytest.raises(NotLeadingError, match="does not hold the Lease"):
            await guarded.delete("ConfigMap", key.namespace, "written")
        assert await guarded.get("ConfigMap", key.namespace, "written")  # reading is free
        assert all(one.at <= lost_at for one in proxy.writes())  # one that was under way has ended


async def test_two_operators_of_which_one_is_suspended_never_write_by_turns(
    api: KubernetesApi, key: ServiceKey, kubeconfig: Path
) -> None:
    async with FaultProxy(kubeconfig) as one, FaultProxy(kubeconfig) as two:
        async with running_operator(one.kubeconfig, key.namespace) as first:
            await eventually(first.is_leading)
            await eventually(lambda: bool(one.writes()))
            async with running_operator(two.kubeconfig, key.namespace) as second:
                await eventually(lambda: _answers(second))
                await eventually(await edit(api, key, 3))
                assert two.writes() == []
                first.process.send_signal(signal.SIGSTOP)  # in the middle of whatever it does
                await eventually(second.is_leading)
                await eventually(await edit(api, key, 4))
                first.process.send_signal(signal.SIGCONT)
                await eventually(await edit(api, key, 2))
                assert not await first.is_leading()
        by_first, by_second = ([w for w in proxy.writes() if "secrets" not in w.path] for proxy in (one, two))
        assert max(one.ended_at for one in by_first) < min(one.at for one in by_second)


def _has_more(proxy: FaultProxy, writes: int) -> bool:
    return len(proxy.writes()) > writes


async def _answers(operator: OperatorProcess) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        return (await operator.health())[0] == 200
    return False
