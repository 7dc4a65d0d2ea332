"""The gate on quality with real parts on this machine: what passes is served, what is broken never is."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from bundled_model.quantized_copy import write_fp8_copy
from headway_operator.commands.up_view import line
from headway_operator.local_service import LocalService, running_service
from headway_operator.spec import InferenceServiceStatus

# An evaluation scores thousands of tokens, two models one after the other, on a processor that others use.
SECONDS = 400.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
BROKEN = {"model.layers.1.mlp.down_proj": 3.0}
QUESTION = [{"role": "user", "content": "What is 27 + 15?"}]


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": "bundled://headway-tiny"},
            "device": "cpu",
            "replicas": 1,
            "batching": {"maxNumSeqs": {"max": 4}, "maxNumBatchedTokens": {"max": 128}},
            "kvCacheMemory": "16Mi",
            "resources": {"limits": {"cpu": "1"}},
            **spec,
        },
    }


def judged_by_text(source: Path, **quality: Any) -> dict[str, Any]:
    """The manifest of a checkpoint that is held against the bundled model, on text alone."""
    baseline = {"source": "bundled://headway-tiny"}
    judge = {"baseline": baseline, "tasks": ["none"], **quality}
    return manifest(model={"source": f"file://{source}"}, quality=judge)


def condition(service: LocalService, kind: str) -> tuple[str, str]:
    found = (one for one in service.status.get("conditions") or () if one["type"] == kind)
    return next(((one["status"], one["reason"]) for one in found), ("", ""))


def revisions(service: LocalService) -> set[str]:
    return {process.name.rpartition("-")[0] for process in service.cluster.processes if process.revision}


async def ask(session: aiohttp.ClientSession, url: str) -> int:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(
    ("spec", "num_tasks"),
    [
        pytest.param({"quantization": "int8", "kvCacheDtype": "fp8", "quality": {}}, 272, id="int8"),
        pytest.param({"quantization": "fp8", "quality": {"tasks": ["none"]}}, 0, id="fp8"),
    ],
)
async def test_what_passes_is_served_and_its_numbers_are_told(
    spec: dict[str, Any], num_tasks: int, tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(manifest(**spec)))
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        started: list[set[str]] = []
        before = asyncio.create_task(_watch(service, started))
        await eventually(lambda: condition(service, "QualityVerified") == ("Unknown", "Verifying"))
        assert condition(service, "Ready") == ("False", "VerifyingQuality")
        assert condition(service, "Progressing") == ("True", "VerifyingQuality")
        await eventually(lambda: condition(service, "QualityVerified") == ("True", "Passed"), SECONDS)
        assert not any(await before)  # no replica had been started
        quality = InferenceServiceStatus.model_validate(service.status).quality
        assert quality is not None
        measured = {check.name: check.value for check in quality.checks}
        assert 1e-5 < (measured["mean KL divergence"] or 0) < 2e-3
        assert abs(measured["perplexity increase"] or 0) < 0.01
        assert quality.text is not None
        assert (quality.text.tokens, quality.withheld) == (6704, None)
        assert [tasks.tasks for tasks in quality.tasks] == ([num_tasks] if num_tasks else [])
        await eventually(lambda: condition(service, "Ready")[0] == "True", SECONDS)
        async with aiohttp.ClientSession() as session:
            assert await ask(session, service.url) == 200
        assert "quality passed (mean KL divergence " in line(service)
        told = {(event.kind, event.reason) for event in service.cluster.events}
        assert {("Normal", "Verifying"), ("Normal", "Passed")} <= told


async def _watch(service: LocalService, seen: list[set[str]]) -> list[set[str]]:
    """The revisions with processes at each change, up to the verdict."""
    while condition(service, "QualityVerified")[0] != "True":
        seen.append(revisions(service))
        await asyncio.sleep(0.02)
    return seen


async def test_a_broken_scale_is_caught_and_what_serves_serves_on(
    tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    good, broken, file = tmp_path / "good", tmp_path / "broken", tmp_path / "service.yaml"
    write_fp8_copy(good)
    write_fp8_copy(broken, BROKEN)

    def write(source: Path) -> None:
        file.write_text(yaml.safe_dump(judged_by_text(source)))

    write(good)
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        await eventually(lambda: condition(service, "Ready")[0] == "True", SECONDS)
        first = service.status["revision"]["name"]
        stop, answers = asyncio.Event(), list[int]()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as users:

            async def user() -> None:
                while not stop.is_set():
                    answers.append(await ask(session, service.url))

            users.create_task(user())
            try:
                write(broken)
                await eventually(
                    lambda: condition(service, "QualityVerified") == ("Unknown", "Verifying"), SECONDS
                )
                assert condition(service, "Progressing") == ("True", "VerifyingQuality")
                await eventually(
                    lambda: condition(service, "QualityVerified") == ("False", "Failed"), SECONDS
                )
                num_answers = len(answers)
                await eventually(lambda: len(answers) > num_answers + 5, SECONDS)
                assert revisions(service) == {first}
            finally:
                stop.set()
        assert set(answers) == {200}
        status = service.status
        assert (status["revision"]["name"], condition(service, "Ready")) == (first, ("True", "Serving"))
        withheld = status["quality"]["withheld"]
        assert withheld not in ("", first)
        assert condition(service, "Progressing") == ("False", "QualityFailed")
        assert condition(service, "Degraded") == ("True", "QualityFailed")
        kl = next(one for one in status["quality"]["checks"] if one["name"] == "mean KL divergence")
        assert kl["value"] > 2 * kl["limit"]
        message = next(one["message"] for one in status["conditions"] if one["type"] == "QualityVerified")
        assert message.startswith("mean KL divergence ")
        assert "above the limit of 0.01 nats" in message
        assert ("Warning", "Failed") in {(event.kind, event.reason) for event in service.cluster.events}
        # What was judged is known: neither way is another evaluation begun.
        num_begun = sum(event.reason == "Verifying" for event in service.cluster.events)
        write(good)
        await eventually(lambda: condition(service, "QualityVerified") == ("True", "Passed"))
        write(broken)
        await eventually(lambda: condition(service, "QualityVerified") == ("False", "Failed"))
        assert sum(event.reason == "Verifying" for event in service.cluster.events) == num_begun == 2


async def test_a_broken_scale_gets_no_traffic_where_nothing_serves_yet(
    tmp_path: Path, free_port: int, eventually: Callable[..., Any]
) -> None:
    broken, file = tmp_path / "broken", tmp_path / "service.yaml"
    write_fp8_copy(broken, BROKEN)
    text = "configmap://judge/own.jsonl"
    rows = "".join(f'{{"text": "{one} + {one} = {2 * one}; what else?"}}\n' for one in range(40))
    files = {"kind": "ConfigMap", "metadata": {"name": "judge"}, "data": {"own.jsonl": rows}}
    tight = {"thresholds": {"maxKl": "0.001", "maxPerplexityIncrease": 1}}
    file.write_text(yaml.safe_dump_all([judged_by_text(broken, text=text, **tight), files]))
    async with running_service(file, port=free_port, interval_seconds=0.5) as service:
        await eventually(lambda: condition(service, "QualityVerified") == ("False", "Failed"), SECONDS)
        assert condition(service, "Ready") == ("False", "QualityFailed")
        assert revisions(service) == set()
        assert service.status["quality"]["text"]["name"] == "own.jsonl"
        limits = {one["name"]: one["limit"] for one in service.status["quality"]["checks"]}
        assert limits == {"mean KL divergence": 0.001, "perplexity increase": 1.0}
        # The user's way out: the gate is taken away, and what was asked for is served.
        open_ = judged_by_text(broken)
        del open_["spec"]["quality"]
        file.write_text(yaml.safe_dump(open_))
        await eventually(lambda: condition(service, "Ready")[0] == "True", SECONDS)
        assert "quality" not in service.status
