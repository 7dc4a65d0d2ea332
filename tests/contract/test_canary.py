"""A canary with real parts: shares at the gateway, evidence from the engines, a decision by the operator."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from headway_operator.local_service import LocalService, running_service

START_SECONDS = 120.0
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "What is 27 + 15?"}], "max_tokens": 8}


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny", "maxModelLen": 256},
            "device": "cpu",
            "replicas": 1,
            "batching": {"maxNumSeqs": {"max": 4}, "maxNumBatchedTokens": {"max": 128}},
            "kvCacheMemory": "16Mi",
            "resources": {"limits": {"cpu": "1"}},
            "rollout": {"canary": {"steps": [25], "holdSeconds": 10, "minRequests": 5}},
            **spec,
        },
    }


def reason(service: LocalService, kind: str) -> str:
    conditions = service.status.get("conditions") or ()
    return next((str(c["reason"]) for c in conditions if c["type"] == kind), "")


def record(service: LocalService) -> dict[str, Any]:
    return dict(service.status.get("rollout") or {})


async def test_a_candidate_takes_its_share_of_real_requests_and_then_all_of_them(
    tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest()))
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        await eventually(lambda: reason(service, "Progressing") == "Settled", START_SECONDS)
        await eventually(lambda: "stable" in record(service), START_SECONDS)
        first = record(service)["stable"]["name"]
        stop, statuses = asyncio.Event(), list[int]()
        counted: dict[str, Any] = {}
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as users:

            async def user() -> None:
                while not stop.is_set():
                    async with session.post(f"{service.url}/v1/chat/completions", json=QUESTION) as response:
                        await response.read()
                        statuses.append(response.status)

            users.create_task(user())
            try:
                await eventually(lambda: len(statuses) > 10, START_SECONDS)
                changed = {"source": "bundled://headway-tiny", "maxModelLen": 192}
                file.write_text(yaml.safe_dump(manifest(model=changed)))
                await eventually(lambda: record(service).get("weight") == 25, START_SECONDS)
                second = record(service)["candidate"]
                assert reason(service, "Progressing") == "Canary"

                def see() -> bool:
                    sample = service.outcome.sample if service.outcome else None
                    for gateway in (sample.gateways if sample else {}).values():
                        if gateway is not None and gateway.routing and gateway.routing.weights:
                            counted.update(gateway.revisions)
                    return bool(record(service).get("stable", {}).get("name") == second)

                await eventually(see, START_SECONDS)
                await eventually(lambda: reason(service, "Progressing") == "Settled", START_SECONDS)
            finally:
                stop.set()
        assert set(statuses) == {200}
        assert counted[second].requests >= 5
        assert counted[second].requests < counted[first].requests
        assert (counted[second].errors, counted[first].errors) == (0, 0)
        told = [event.reason for event in service.cluster.events]
        assert "CanaryStep" in told
        assert "RolloutComplete" in told
