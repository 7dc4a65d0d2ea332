"""Falling asleep, waking and suspension with real parts: operator, gateway, engine, clients."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from headway_operator import loop as loop_module
from headway_operator.keys import AdminKeys
from headway_operator.local_service import LocalService, running_service
from headway_operator.loop import ServiceLoop
from headway_operator.names import ServiceKey
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Outcome, World
from headway_operator.samples import Limits
from headway_operator.scrape import Scraper
from headway_operator.state import Attainment, Decision, Gateway, Observed

pytestmark = pytest.mark.long
START_SECONDS = 120.0
HOUR = 3600.0
KEY = ServiceKey("default", "demo")
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "What is 27 + 15?"}], "max_tokens": 8}


@pytest.fixture
def manifest() -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny", "maxModelLen": 256},
            "device": "cpu",
            "slo": {"ttftMilliseconds": 5000},
            "scaling": {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 10},
            "batching": {"maxNumSeqs": {"max": 4}, "maxNumBatchedTokens": {"max": 128}},
            "kvCacheMemory": "16Mi",
            "resources": {"limits": {"cpu": "1"}},
        },
    }


def reason(service: LocalService, kind: str = "Ready") -> str:
    conditions = service.status.get("conditions") or ()
    return next((str(c["reason"]) for c in conditions if c["type"] == kind), "")


def num_replicas(service: LocalService) -> int:
    return sum(bool(process.revision) for process in service.cluster.processes)


async def ask(session: aiohttp.ClientSession, url: str, **more: Any) -> tuple[int, str, str]:
    """Status, Retry-After, body."""
    async with session.post(f"{url}/v1/chat/completions", json=QUESTION | more) as response:
        return response.status, response.headers.get("Retry-After", ""), await response.text()


async def test_the_first_requests_wake_a_sleeping_service_and_are_served(
    manifest: dict[str, Any], tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest))
    async with (
        running_service(file, port=free_port, interval_seconds=1.0) as service,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_SECONDS)) as session,
    ):
        await eventually(lambda: reason(service) == "Serving", START_SECONDS)
        assert (await ask(session, service.url))[0] == 200
        await eventually(lambda: reason(service) == "Asleep" and num_replicas(service) == 0, START_SECONDS)
        await eventually(lambda: reason(service, "Progressing") == "Asleep", START_SECONDS)
        answers = await asyncio.gather(
            ask(session, service.url), ask(session, service.url, stream=True), ask(session, service.url)
        )
        assert [status for status, _, _ in answers] == [200, 200, 200], answers
        assert answers[1][2].rstrip().endswith("data: [DONE]")
        await eventually(lambda: reason(service) == "Asleep", START_SECONDS)
        assert service.outcome is not None
        assert service.outcome.sample is not None
        (gateway,) = service.outcome.sample.gateways.values()
        assert gateway is not None
        assert (gateway.counters["finished"], gateway.counters["rejected"]) == (4, 0)
        told = [event.reason for event in service.cluster.events]
        assert told.count("Woken") == 1
        assert told.count("Idle") == 2

        # Beyond the bounds a request is refused, with a time to come back.
        manifest["spec"]["waiting"] = {"maxRequests": 1}
        file.write_text(yaml.safe_dump(manifest))
        await eventually(lambda: routing(service).max_waiting == 1, START_SECONDS)
        two = await asyncio.gather(ask(session, service.url), ask(session, service.url))
        (held, _, _), (refused, retry_after, _) = sorted(two)
        assert (held, refused, int(retry_after) >= 1) == (200, 503, True)


def routing(service: LocalService) -> Any:
    sample = service.outcome.sample if service.outcome else None
    (gateway,) = sample.gateways.values() if sample else (None,)
    return gateway.routing if gateway else None


async def test_a_suspended_service_refuses_at_once_keeps_its_children_and_comes_back(
    manifest: dict[str, Any], tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    manifest["spec"]["replicas"] = 1
    file.write_text(yaml.safe_dump(manifest))
    async with (
        running_service(file, port=free_port, interval_seconds=0.5) as service,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_SECONDS)) as session,
    ):
        await eventually(lambda: reason(service) == "Serving", START_SECONDS)
        before = (await service.cluster.observe(service.key)).children
        manifest["spec"]["suspend"] = True
        file.write_text(yaml.safe_dump(manifest))
        await eventually(lambda: reason(service) == "Suspended" and num_replicas(service) == 0, START_SECONDS)
        assert reason(service, "Progressing") in ("RemovingReplicas", "Suspended")
        assert (await service.cluster.observe(service.key)).children == before
        asked_at = time.monotonic()
        status, retry_after, body = await ask(session, service.url)
        assert (status, retry_after) == (503, "60")
        assert "spec.suspend" in body
        assert time.monotonic() - asked_at < 5.0, "nobody is held who cannot be served"
        manifest["spec"]["suspend"] = False
        file.write_text(yaml.safe_dump(manifest))
        await eventually(lambda: routing(service) and not routing(service).is_suspended, START_SECONDS)
        assert (await ask(session, service.url))[0] == 200


@pytest.fixture
async def gateway(tmp_path: Path, keys: AdminKeys) -> AsyncIterator[str]:
    """A real gateway without replicas; its URL."""
    backends, key_file, port_file = (tmp_path / name for name in ("backends.json", "public.pem", "port"))
    backends.write_text('{"version": 1, "backends": []}')
    key_file.write_text(keys.public_pem)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headway", "gateway", "--port", "0", "--port-file", str(port_file)),
        *("--backends-file", str(backends), "--admin-public-key-file", str(key_file)),
        *("--admin-audience", str(KEY)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(START_SECONDS):
        while not port_file.exists():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.02)
    yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    process.terminate()
    await process.wait()


@pytest.fixture
def keys() -> AdminKeys:
    return AdminKeys.generate()


async def test_a_waiting_request_brings_a_pass_without_waiting_for_the_interval(
    gateway: str, keys: AdminKeys, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Attainment(None, None, 0, 0, "unknown")
    causes, passes = iter(("Asleep", "Woken", "WaitingForReplicas")), list[float]()

    async def reconcile(world: Any, manifest: Any, carried: Any) -> Outcome:
        passes.append(time.monotonic())
        decision = Decision(0.0, 0, Limits(1, 1), next(causes), "", "", nothing, nothing, {})
        return Outcome(KEY, {}, Observed(gateway=Gateway(True, (gateway,))), decision=decision)

    async def fetch(key: ServiceKey) -> dict[str, Any]:
        return {"metadata": {"uid": "u1"}}

    monkeypatch.setattr(loop_module, "reconcile", reconcile)
    async with Scraper(keys, time.time) as scraper, aiohttp.ClientSession() as session:
        cluster: Any = None  # only `reconcile` would look at it
        world = World(cluster, scraper, keys, time.time)
        loop = ServiceLoop(world, KEY, fetch, interval_seconds=HOUR, metrics=OperatorMetrics())
        task = asyncio.create_task(loop.run())
        try:
            await eventually(lambda: len(passes) == 1)
            request = asyncio.create_task(session.post(f"{gateway}/v1/chat/completions", json=QUESTION))
            asked_at = time.monotonic()
            await eventually(lambda: len(passes) == 2)
            assert passes[1] - asked_at < 2.0
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert loop._listeners == {}
