"""Adapters over HTTP: listed, chosen by `model` in every route, loaded and unloaded while requests run."""

from __future__ import annotations

import concurrent.futures
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai
import pytest
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from tests.adapters.conftest import Checkpoint, Server, StartServer

PROMPTS = ["Once upon a time", "What is 12 + 30?", "one two three one two"]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def server(start_server: StartServer, bundled: Checkpoint) -> Server:
    """Two HTTP processes."""
    return start_server(
        "--enable-lora",
        "--lora-modules",
        f"one={bundled.adapters['one']}",
        f'{{"name": "two", "path": "{bundled.adapters["two"]}", "base_model_name": "also"}}',
        "--served-model-name=also",
        "--max-cpu-loras=9",
        "--api-server-count=2",
    )


@pytest.fixture(scope="module")
def tokenizer(bundled: Checkpoint) -> Any:
    return Tokenizer.from_file(str(bundled.folder / "tokenizer.json"))


def expected(bundled: Checkpoint, tokenizer: Any, name: str, prompt: str) -> list[int]:
    return bundled.greedy(name, tokenizer.encode(prompt).ids, NUM_TOKENS)


OPTIONS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "extra_body": {"return_token_ids": True, "ignore_eos": True},
}


def test_adapters_are_listed_with_their_parents(server: Server, bundled: Checkpoint) -> None:
    with server.client() as client:
        listed = {one.id: one.model_dump() for one in client.models.list()}
        alone = client.models.retrieve("one").model_dump()
    assert list(listed)[:4] == ["tiny", "also", "one", "two"]
    assert (listed["tiny"]["parent"], listed["one"]["parent"], listed["two"]["parent"]) == (
        None,
        "tiny",
        "also",
    )
    assert listed["one"]["root"] == str(bundled.adapters["one"])
    assert listed["one"]["max_model_len"] == 512
    assert alone == listed["one"]


@pytest.mark.parametrize("name", ["tiny", "one", "two"])
def test_batched_prompts_are_all_answered_with_the_adapter_that_model_names(
    name: str, server: Server, bundled: Checkpoint, tokenizer: Any
) -> None:
    with server.client() as client:
        answer = client.completions.create(model=name, prompt=PROMPTS, **OPTIONS)
    assert answer.model == name
    adapter = "" if name == "tiny" else name
    for choice, prompt in zip(answer.choices, PROMPTS, strict=True):
        token_ids = choice.model_dump()["token_ids"]
        assert token_ids == expected(bundled, tokenizer, adapter, prompt), (name, prompt)


def test_chats_and_responses_choose_by_name_too(server: Server) -> None:
    texts: dict[str, set[str]] = {}
    with server.client() as client:
        for name in ("tiny", "one", "two"):
            chat = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": PROMPTS[0]}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            response = client.responses.create(
                model=name,
                input=PROMPTS[0],
                max_output_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            texts[name] = {chat.choices[0].message.content or "", response.output_text}
            assert chat.model == response.model == name
            assert len(texts[name]) == 1
    assert len({text for own in texts.values() for text in own}) == 3


def test_a_body_that_another_process_reads_has_its_adapter(
    server: Server, bundled: Checkpoint, tokenizer: Any
) -> None:
    padding = {"metadata": {str(number): "x" * 500 for number in range(600)}}
    with server.client() as client:
        answer = client.completions.create(
            model="one",
            prompt=PROMPTS[0],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True, **padding},
        )
    assert answer.choices[0].model_dump()["token_ids"] == expected(bundled, tokenizer, "one", PROMPTS[0])


def test_the_tokenizers_routes_know_adapters(server: Server) -> None:
    for name, status in (("one", 200), ("nobody", 404)):
        body = {"model": name, "prompt": "some text"}
        answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=30)
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "model_not_found"


def test_many_requests_at_once_each_get_their_own_adapter(
    server: Server, bundled: Checkpoint, tokenizer: Any
) -> None:
    jobs = [(name, prompt) for prompt in PROMPTS for name in ("tiny", "one", "two")] * 2

    def ask(job: tuple[str, str]) -> list[int]:
        with server.client() as client:
            answer = client.completions.create(model=job[0], prompt=job[1], **OPTIONS)
        token_ids: list[int] = answer.choices[0].model_dump()["token_ids"]
        return token_ids

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(ask, jobs))
    for (name, prompt), token_ids in zip(jobs, found, strict=True):
        assert token_ids == expected(bundled, tokenizer, "" if name == "tiny" else name, prompt), (
            name,
            prompt,
        )


def test_an_adapter_is_loaded_for_all_processes_and_unloaded_while_a_stream_has_it(
    server: Server, bundled: Checkpoint, tokenizer: Any
) -> None:
    answer = server.load("live", bundled.adapters["one"])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'live' added successfully.")
    for _ in range(6):  # each time another connection, perhaps to another process
        with server.client() as client:
            done = client.completions.create(model="live", prompt=PROMPTS[1], **OPTIONS)
            assert done.choices[0].model_dump()["token_ids"] == expected(
                bundled, tokenizer, "one", PROMPTS[1]
            )
    with server.client() as client:
        stream = client.completions.create(
            model="live",
            prompt=PROMPTS[0],
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        token_ids = list(next(iter(stream)).choices[0].model_dump()["token_ids"])
        assert server.unload("live").text == "Success: LoRA adapter 'live' removed successfully."
        for _ in range(6):
            with server.client() as other, pytest.raises(openai.NotFoundError) as refused:
                other.completions.create(model="live", prompt=PROMPTS[0], max_tokens=1)
            assert refused.value.code == "model_not_found"
        # Another one of the same name changes nothing for who has the old one.
        assert server.load("live", bundled.adapters["two"]).status_code == 200
        for chunk in stream:
            token_ids += chunk.choices[0].model_dump()["token_ids"] if chunk.choices else []
    prompt = tokenizer.encode(PROMPTS[0]).ids
    assert token_ids == bundled.greedy("one", prompt, 300)
    with server.client() as client:
        done = client.completions.create(model="live", prompt=PROMPTS[0], **OPTIONS)
    assert done.choices[0].model_dump()["token_ids"] == expected(bundled, tokenizer, "two", PROMPTS[0])
    assert server.unload("live").status_code == 200


def test_a_reload_in_place_takes_the_name_at_once(
    server: Server, bundled: Checkpoint, tokenizer: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    for source in ("one", "two"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(bundled.adapters[source], folder)
        assert server.load("again", f"file://{folder}", load_inplace=True).status_code == 200
        with server.client() as client:
            done = client.completions.create(model="again", prompt=PROMPTS[2], **OPTIONS)
        assert done.choices[0].model_dump()["token_ids"] == expected(bundled, tokenizer, source, PROMPTS[2])
    assert server.unload("again").status_code == 200


def test_what_cannot_be_loaded_is_told_by_file_field_and_remedy(
    server: Server, bundled: Checkpoint, checkpoint: Any, tmp_path: Path
) -> None:
    def error(answer: httpx.Response) -> tuple[int, str, str, str]:
        told = answer.json()["error"]
        return answer.status_code, told["code"], told["param"], told["message"]

    status, code, param, message = error(server.load("foreign", checkpoint().adapters["one"]))
    assert (status, code, param) == (400, "adapter_not_usable", "lora_path")
    assert "adapter_model.safetensors: lora_A of 'model.layers.0." in message
    assert "this model and adapter_config.json (r) ask for" in message
    assert error(server.load("x", tmp_path))[:3] == (404, "adapter_not_found", "lora_path")
    assert error(server.load("one", bundled.adapters["one"]))[:3] == (400, "adapter_not_usable", "lora_name")
    assert error(server.load("tiny", bundled.adapters["one"]))[:3] == (400, "adapter_not_usable", "lora_name")
    assert error(server.load("a b", bundled.adapters["one"]))[:3] == (400, "adapter_not_usable", "lora_name")
    assert error(server.load("x", "pvc://claim/path"))[:3] == (404, "adapter_not_found", "lora_path")
    assert error(server.load("", "y"))[:3] == (400, "empty_string", "lora_name")
    assert error(server.unload("nobody"))[:3] == (404, "adapter_not_found", "lora_name")
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json={}, headers=server.operator, timeout=30)
    assert error(answer)[:3] == (400, "missing_required_parameter", "lora_name")
    # None of them has left anything behind.
    assert server.metrics()["headway_lora_leaving"] == 0
    with server.client() as client:
        assert [one.id for one in client.models.list()] == ["tiny", "also", "one", "two"]


def test_the_metrics_tell_what_is_loaded_and_used(server: Server, bundled: Checkpoint) -> None:
    before = server.metrics()
    assert before['headway_lora_loaded{adapter="one"}'] == 1
    with server.client() as client:
        stream = client.completions.create(
            model="two", prompt=PROMPTS[0], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert any(
            name.startswith("headway_lora_requests_info{") and 'running_lora_adapters="two"' in name
            for name in server.metrics()
        )
        stream.close()
    server.load("three", bundled.adapters["one"])
    during = server.metrics()
    server.unload("three")
    after = server.metrics()
    assert (
        during['headway_lora_loads_total{result="loaded"}']
        == before['headway_lora_loads_total{result="loaded"}'] + 1
    )
    assert during["headway_lora_memory_bytes"] > before["headway_lora_memory_bytes"]
    assert after["headway_lora_memory_bytes"] == before["headway_lora_memory_bytes"]
    assert after["headway_lora_unloads_total"] == before["headway_lora_unloads_total"] + 1


def test_who_may_load_adapters(start_server: StartServer, bundled: Checkpoint) -> None:
    def try_to(server: Server, api_key: str | None) -> tuple[int, str]:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        body = {"lora_name": "x", "lora_path": str(bundled.adapters["one"])}
        answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=headers, timeout=60)
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

    off = start_server()
    assert try_to(off, None) == (403, "lora_disabled")
    assert off.load("x", bundled.adapters["one"]).json()["error"]["code"] == "lora_disabled"
    plain = start_server("--enable-lora", "--api-key", "first")
    assert try_to(plain, None) == (401, "invalid_api_key")
    assert try_to(plain, "first") == (403, "lora_updating_disabled")
    assert plain.load("x", bundled.adapters["one"]).status_code == 200
    sole = start_server(
        "--enable-lora", "--api-key", "first", environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    )
    assert try_to(sole, "wrong") == (401, "invalid_api_key")
    assert try_to(sole, "first") == (200, "")
    shared = start_server("--enable-lora", "--api-key", "first", "second", "--allow-runtime-lora-updating")
    assert try_to(shared, "second") == (403, "not_the_operator")
    assert shared.load("x", bundled.adapters["one"]).status_code == 200
