"""The whole path on this machine with real parts: manifest, processes, tokens, sample, live limits, drain."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from headway_operator.keys import AdminKeys
from headway_operator.local_service import LocalService, running_service
from headway_operator.scrape import Scraper

START_SECONDS = 120.0
QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]


@pytest.fixture
def manifest() -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny", "maxModelLen": 256},
            "device": "cpu",
            "slo": {"ttftMilliseconds": 5000, "endToEndMilliseconds": 600_000},
            "scaling": {"minReplicas": 1, "maxReplicas": 2},
            "batching": {"maxNumSeqs": {"max": 4}, "maxNumBatchedTokens": {"max": 128}},
            "kvCacheMemory": "16Mi",
            "resources": {"limits": {"cpu": "1"}},
        },
    }


async def ask(session: aiohttp.ClientSession, url: str, api_key: str = "") -> tuple[int, dict[str, Any]]:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_a_manifest_becomes_tokens_a_sample_and_live_limits(
    manifest: dict[str, Any],
    tmp_path: Path,
    free_port: int,
    eventually: Callable[..., Any],
    children: Callable[[], list[psutil.Process]],
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest))
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        await eventually(lambda: is_ready(service), START_SECONDS)
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                status, answer = await ask(session, service.url)
                assert status == 200, answer
                assert answer["usage"]["completion_tokens"] >= 1
        sample = await eventually(lambda: counted(service, 3))
        assert sample.counters["received"] == sample.counters["finished"] == 3
        assert sample.counters["ttft_met"] + sample.counters["ttft_missed"] == 3
        assert sum(sample.histograms["ttft"].counts) == 3
        assert sample.counters["e2e_met"] + sample.counters["e2e_missed"] == 3
        assert sum(sample.histograms["e2e"].counts) == 3
        assert sample.targets.ttft_milliseconds == 5000.0
        assert sample.targets.e2e_milliseconds == 600_000.0
        whole = await eventually(lambda: service.status["slo"]["endToEndMilliseconds"])
        assert (whole["target"], whole["percentile"]) == (600_000.0, 95)
        assert sample.limits.max_num_seqs == 4

        manifest["spec"]["slo"]["ttftMilliseconds"] = 7000
        manifest["spec"]["scaling"]["minReplicas"] = 2
        file.write_text(yaml.safe_dump(manifest))
        await eventually(lambda: targets(service) == {7000.0}, START_SECONDS)
        await eventually(lambda: service.status["readyReplicas"] == 2, START_SECONDS)
        instances = {s.instance for s in samples(service)}
        assert sample.instance in instances  # nothing was restarted
        assert len(instances) == 2
        assert service.outcome is not None
        assert service.outcome.sample is not None
        (gateway,) = service.outcome.sample.gateways.values()
        assert gateway is not None
        assert gateway.counters["finished"] == 3
        family = children()
    _, alive = psutil.wait_procs(family, timeout=0)
    assert alive == []


async def test_only_this_operator_is_let_in_and_only_clients_with_a_key(
    manifest: dict[str, Any], tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    manifest["spec"]["auth"] = {"apiKeysSecretRef": {"name": "clients"}}
    secret = {"kind": "Secret", "metadata": {"name": "clients"}, "stringData": {"api-keys": "sesame\n"}}
    file.write_text(yaml.safe_dump_all([manifest, secret]))
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        await eventually(lambda: is_ready(service), START_SECONDS)
        async with aiohttp.ClientSession() as session:
            assert [(await ask(session, service.url, api_key))[0] for api_key in ("", "no", "sesame")] == [
                *(401, 401, 200)
            ]
        observed = await service.cluster.observe(service.key)
        async with Scraper(AdminKeys.generate(), time.time) as stranger:
            sample = await stranger.sample(service.key, observed)
        assert list(sample.replicas.values()) == [None]
        assert list(sample.gateways.values()) == [None]
        assert len(sample.errors) == 2
        assert all("answered 401" in error for error in sample.errors.values())


async def test_no_request_fails_while_replicas_leave_and_a_new_revision_comes(
    manifest: dict[str, Any], tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    manifest["spec"]["replicas"] = 2
    file.write_text(yaml.safe_dump(manifest))
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        await eventually(lambda: service.status.get("readyReplicas") == 2, START_SECONDS)
        await eventually(lambda: is_ready(service), START_SECONDS)
        first = service.status["revision"]["name"]
        stop, answers = asyncio.Event(), list[tuple[int, dict[str, Any]]]()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as users:

            async def user() -> None:
                while not stop.is_set():
                    answers.append(await ask(session, service.url))

            for _ in range(3):
                users.create_task(user())
            try:
                await eventually(lambda: len(answers) > 10, START_SECONDS)
                manifest["spec"]["replicas"] = 1
                file.write_text(yaml.safe_dump(manifest))
                await eventually(
                    lambda: replica_names(service) in ({f"{first}-0"}, {f"{first}-1"}), START_SECONDS
                )
                manifest["spec"]["model"]["maxModelLen"] = 192
                file.write_text(yaml.safe_dump(manifest))
                await eventually(
                    lambda: first not in {name.rpartition("-")[0] for name in replica_names(service)},
                    START_SECONDS,
                )
                num_answers = len(answers)
                await eventually(lambda: len(answers) > num_answers + 10, START_SECONDS)
            finally:
                stop.set()
        assert service.status["revision"]["name"] != first
        assert [answer for answer in answers if answer[0] != 200] == []


def replica_names(service: LocalService) -> set[str]:
    return {process.name for process in service.cluster.processes if process.revision}


def is_ready(service: LocalService) -> bool:
    conditions = service.status.get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def samples(service: LocalService) -> list[Any]:
    sample = service.outcome.sample if service.outcome else None
    return [one for one in (sample.replicas if sample else {}).values() if one is not None]


def counted(service: LocalService, finished: int) -> Any:
    return next((one for one in samples(service) if one.counters["finished"] >= finished), None)


def targets(service: LocalService) -> set[float | None]:
    return {one.targets.ttft_milliseconds for one in samples(service)}
