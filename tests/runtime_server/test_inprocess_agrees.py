"""The engine in one's own process and the one behind the server give the same answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

from headway_runtime import Engine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer

PROMPTS = ["one two", "three", "alpha beta gamma"]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    with Engine(str(model_folder), load_format="dummy", device="cpu", max_num_seqs=8, num_threads=1) as one:
        yield one


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "max_tokens": 12},
        {"temperature": 0.9, "seed": 11, "n": 3, "max_tokens": 12, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.2, "seed": -5, "max_tokens": 20, "min_p": 0.01, "presence_penalty": 1.5},
        {"temperature": 0.7, "seed": 3, "max_tokens": 20, "ignore_eos": True, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "choices", "penalty", "repetition"],
)
def test_the_same_options_give_the_same_text(
    engine: Engine, real_server: RunningServer, options: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": PROMPTS, **options}
    answer = httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=60).json()
    want = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    outputs = engine.generate(PROMPTS, SamplingParams(**options), use_tqdm=False)
    assert [(one.text, one.finish_reason) for output in outputs for one in output.outputs] == want
    assert (
        sum(len(one.token_ids) for output in outputs for one in output.outputs)
        == (answer["usage"]["completion_tokens"])
    )
    assert sum(len(output.prompt_token_ids) for output in outputs) == answer["usage"]["prompt_tokens"]


def test_a_chat_is_the_same_chat(engine: Engine, real_server: RunningServer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]},
    ]
    body = {"messages": messages, "seed": 4, "max_tokens": 10}
    answer = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=60).json()
    output = engine.chat(messages, SamplingParams(seed=4, max_tokens=10), use_tqdm=False)[0]
    assert output.text == answer["choices"][0]["message"]["content"]
    assert len(output.prompt_token_ids) == answer["usage"]["prompt_tokens"]


def test_a_chat_with_tools_is_the_same_prompt(engine: Engine, real_server: RunningServer) -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "It will"}],
        "tools": [{"type": "function", "function": function}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = httpx.post(f"{real_server.url}/tokenize", json=asked, timeout=60).json()
    output = engine.chat(sampling_params=SamplingParams(max_tokens=1), use_tqdm=False, **asked)[0]
    assert list(output.prompt_token_ids) == answer["tokens"]
