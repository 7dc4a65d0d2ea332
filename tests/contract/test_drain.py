"""A long answer through operator, gateway and engine while its replica is removed."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from headway_operator.local_service import LocalService, running_service

START_SECONDS = 120.0
# As long as an answer may take that nobody would cut short.
ANSWER_SECONDS = 300.0
NUM_ANSWERS = 16
# Several seconds of work for one core, whichever.
MOST_TOKENS = 1900
SHORT_DRAIN_SECONDS = 1

pytestmark = pytest.mark.timeout(600)


def manifest(slo: dict[str, int]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny", "maxModelLen": 2048},
            "device": "cpu",
            "slo": slo,
            "replicas": 1,
            "drainTimeoutSeconds": SHORT_DRAIN_SECONDS,
            "batching": {"maxNumSeqs": {"max": NUM_ANSWERS}, "maxNumBatchedTokens": {"max": 128}},
            "kvCacheMemory": "256Mi",
            "resources": {"limits": {"cpu": "1"}},
        },
    }


def is_serving(service: LocalService) -> bool:
    conditions = service.status.get("conditions") or ()
    return any(one["type"] == "Ready" and one["reason"] == "Serving" for one in conditions)


def is_draining(service: LocalService) -> bool:
    observed = service.outcome.observed if service.outcome else None
    return observed is not None and any(one.phase == "draining" for one in observed.replicas)


async def answer(session: aiohttp.ClientSession, url: str, begun: asyncio.Event) -> str:
    """The whole stream, once it has begun."""
    question = {"model": "demo", "prompt": "Count:", "max_tokens": MOST_TOKENS, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=question | {"stream": True}) as response:
        assert response.status == 200
        first = await response.content.readany()
        begun.set()
        return (first + await response.content.read()).decode()


@pytest.mark.parametrize(
    ("slo", "want"),
    [
        # 2048 tokens at this pace take 205 s.
        pytest.param(
            {"ttftMilliseconds": 5000, "tpotMilliseconds": 100}, "whole", id="as long as is promised"
        ),
        # No pace is promised: the pods have the second that they were given.
        pytest.param({"ttftMilliseconds": 5000}, "broken off", id="as short as was asked"),
    ],
)
async def test_a_long_answer_ends_whole_where_the_promise_says_how_long_it_may_take(
    slo: dict[str, int],
    want: str,
    tmp_path: Path,
    free_port: int,
    eventually: Callable[..., Any],
) -> None:
    file, told = tmp_path / "service.yaml", manifest(slo)
    file.write_text(yaml.safe_dump(told))
    async with (
        running_service(file, port=free_port, interval_seconds=0.5) as service,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as session,
    ):
        await eventually(lambda: is_serving(service), START_SECONDS)
        begun = [asyncio.Event() for _ in range(NUM_ANSWERS)]
        running = [asyncio.create_task(answer(session, service.url, one)) for one in begun]
        await asyncio.gather(*(one.wait() for one in begun))
        told["spec"]["suspend"] = True  # every replica is removed
        file.write_text(yaml.safe_dump(told))
        await eventually(lambda: is_draining(service), START_SECONDS)
        since = time.monotonic()
        answers = await asyncio.gather(*running)
        took = time.monotonic() - since
        await eventually(lambda: not any(one.revision for one in service.cluster.processes), START_SECONDS)
    ends = [text.rstrip().endswith("data: [DONE]") and '"error"' not in text for text in answers]
    assert {"whole" if end else "broken off" for end in ends} == {want}
    if want == "whole":
        assert took > SHORT_DRAIN_SECONDS, "these answers were too short to prove anything"
