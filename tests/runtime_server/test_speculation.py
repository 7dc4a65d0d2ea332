"""A server that guesses tokens ahead: the same answers, counted guesses, and a limit that moves live."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer

PROMPT = "the quick brown fox the quick brown fox the quick"


@pytest.fixture(scope="module")
def guessing_server(start_shared_server: StartServer, model_folder: Path) -> RunningServer:
    """Random weights, and the same ones once more, which guess well."""
    config = json.dumps({"model": str(model_folder), "num_speculative_tokens": 4, "adaptive": False})
    return start_shared_server(
        "--max-num-seqs=8", "--num-threads=1", f"--speculative-config={config}", fake=False
    )


@pytest.fixture(scope="module")
def guessing_client(guessing_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guessing_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metrics_of(server: RunningServer) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics", timeout=15).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("headway_spec_decode") and not sample.labels
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 0.0}, id="greedy"),
        pytest.param({"temperature": 0.8, "seed": 5, "n": 3}, id="choices with a seed"),
        pytest.param({"temperature": 0.0, "logprobs": 2}, id="log-probabilities"),
        pytest.param({"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {"40": 3}}, id="edits"),
    ],
)
def test_answers_whole_and_streamed_are_those_without_guesses(
    openai_client: openai.OpenAI,
    guessing_client: openai.OpenAI,
    guessing_server: RunningServer,
    options: dict[str, Any],
) -> None:
    before = metrics_of(guessing_server)
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, **options}
    want = openai_client.completions.create(**request)
    got = guessing_client.completions.create(**request)
    for one, other in zip(got.choices, want.choices, strict=True):
        if other.logprobs is not None:
            assert one.logprobs is not None
            # In float32, products of more rows may differ in their last bits.
            assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-3)
            assert one.logprobs.tokens == other.logprobs.tokens
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    assert got.usage is not None
    assert want.usage is not None
    assert got.usage.completion_tokens == want.usage.completion_tokens
    texts = [""] * len(want.choices)
    for chunk in guessing_client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in want.choices]
    after = metrics_of(guessing_server)
    assert (
        after["headway_spec_decode_accepted_tokens_total"]
        > before["headway_spec_decode_accepted_tokens_total"]
    )
    assert after["headway_spec_decode_draft_tokens_total"] > before["headway_spec_decode_draft_tokens_total"]


def test_a_stop_string_ends_an_answer_in_the_middle_of_what_came_together(
    openai_client: openai.OpenAI, guessing_client: openai.OpenAI
) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = openai_client.completions.create(**request).choices[0].text
    for start in range(6, len(text) - 3, 5):
        stop = text[start : start + 3]
        got = guessing_client.completions.create(**request, stop=[stop])
        want = openai_client.completions.create(**request, stop=[stop])
        assert got.choices == want.choices
        assert got.choices[0].finish_reason == "stop"
        assert got.usage == want.usage


def test_the_limit_moves_while_the_server_runs(
    guessing_server: RunningServer, guessing_client: openai.OpenAI
) -> None:
    limits = guessing_server.admin("GET", "limits").json()
    assert limits["limits"]["num_speculative_tokens"] == 4
    assert limits["envelope"]["num_speculative_tokens"] == [0, 4]
    request: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}

    def num_guessed() -> float:
        before = metrics_of(guessing_server)["headway_spec_decode_draft_tokens_total"]
        guessing_client.completions.create(**request)
        return metrics_of(guessing_server)["headway_spec_decode_draft_tokens_total"] - before

    answer = guessing_server.admin("PATCH", "limits", {"num_speculative_tokens": 0})
    assert answer.json()["limits"]["num_speculative_tokens"] == 0
    assert num_guessed() == 0
    refused = guessing_server.admin("PATCH", "limits", {"num_speculative_tokens": 5})
    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == "num_speculative_tokens"
    guessing_server.admin("PATCH", "limits", {"num_speculative_tokens": 4})
    assert num_guessed() > 0
    # What other limits are set to does not touch it.
    guessing_server.admin("PATCH", "limits", {"max_num_seqs": 7})
    assert guessing_server.sample()["limits"]["num_speculative_tokens"] == 4


def test_a_server_that_does_not_guess_says_so(real_server: RunningServer) -> None:
    assert real_server.admin("GET", "limits").json()["envelope"]["num_speculative_tokens"] == [0, 0]
    assert metrics_of(real_server)["headway_spec_decode_drafts_total"] == 0
    assert real_server.admin("PATCH", "limits", {"num_speculative_tokens": 1}).status_code == 422
