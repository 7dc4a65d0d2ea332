"""The whole server, real engine included, as the `openai` client sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.runtime_server.conftest import RunningServer

MESSAGES = [{"role": "user", "content": "What is 12 + 30? 日本語"}]


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(real_server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens + 20 == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    assert whole.choices[0].finish_reason == "length"

    chunks = list(
        client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks[:-1]) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_speaks_of_it(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str:
        completion = client.completions.create(model="tiny", prompt="Once", max_tokens=24, seed=seed)
        return completion.choices[0].text

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(3)}) == 3


def test_several_prompts_and_choices_come_in_order(client: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "max_tokens": 8, "seed": 5, "top_p": 0.9, "extra_body": {"top_k": 100}}
    completion = client.completions.create(prompt=["one two", "three"], n=2, **arguments)  # type: ignore[call-overload]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.usage.completion_tokens == 32
    first = client.completions.create(prompt="one two", **arguments)  # type: ignore[call-overload]
    assert completion.choices[0].text == first.choices[0].text
    assert completion.choices[0].text != completion.choices[1].text


def test_token_ids_are_a_prompt(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="tiny", prompt=[[10, 11, 12], [13]], max_tokens=3, temperature=0
    )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 4
    alone = client.completions.create(model="tiny", prompt=[13], max_tokens=3, temperature=0)
    assert alone.choices[0].text == completion.choices[1].text


def test_log_probabilities_belong_to_the_tokens(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 6
    for token in content:
        assert len(token.top_logprobs) == 3
        # Greedy: the token chosen is the best of them.
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert token.bytes == token.top_logprobs[0].bytes
    joined = b"".join(bytes(token.bytes or []) for token in content)
    assert joined.decode("utf-8", "replace") == chat.choices[0].message.content

    completion = client.completions.create(
        model="tiny", prompt="a", max_tokens=5, temperature=0, logprobs=2, seed=1
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == 5
    assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs)


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "headway")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_prompt_that_is_too_long_is_refused_at_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 2000, max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    longest = client.completions.create(model="tiny", prompt=[50] * 511, max_tokens=100)
    assert longest.usage is not None
    assert (longest.usage.completion_tokens, longest.choices[0].finish_reason) == (1, "length")


@pytest.mark.parametrize("num_streams", [24])
async def test_concurrent_streams_do_not_mix(async_client: openai.AsyncOpenAI, num_streams: int) -> None:
    async def streamed(seed: int) -> str:
        stream = await async_client.completions.create(
            model="tiny", prompt=f"number {seed}", max_tokens=20 + seed, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def whole(seed: int) -> str:
        completion = await async_client.completions.create(
            model="tiny", prompt=f"number {seed}", max_tokens=20 + seed, seed=seed
        )
        return completion.choices[0].text

    together = await asyncio.gather(*(streamed(seed) for seed in range(num_streams)))
    again = await asyncio.gather(*(whole(seed) for seed in range(num_streams)))
    assert together == again


def test_every_request_is_counted_once_and_leaves_no_block(
    real_server: RunningServer, client: openai.OpenAI
) -> None:
    before = real_server.sample()
    whole: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    for _ in range(3):
        list(client.completions.create(**whole, stream=True))
    client.completions.create(**whole)
    after = real_server.sample()
    grown = {name: after["counters"][name] - before["counters"][name] for name in after["counters"]}
    assert (grown["received"], grown["finished"], grown["generated_tokens"]) == (4, 4, 16)
    assert sum(after["histograms"]["ttft"]["counts"]) - sum(before["histograms"]["ttft"]["counts"]) == 4
    assert after["gauges"]["kv_blocks_used"] == after["gauges"]["running"] == 0


def test_tokenize_and_detokenize_are_inverse(real_server: RunningServer) -> None:
    text = "The quick brown fox 日本語 👩‍👩‍👧"
    tokens = httpx.post(f"{real_server.url}/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    back = httpx.post(f"{real_server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": text}
    chat = httpx.post(f"{real_server.url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"][0] == 0, "the template's own beginning-of-sequence, once"


def test_the_access_log_says_where_the_time_of_a_request_went(real_server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "ignore_eos": True}
    headers = {"X-Request-Id": "where-the-time-went"}
    assert httpx.post(f"{real_server.url}/v1/completions", json=body, headers=headers).is_success
    entry = real_server.access_entry("where-the-time-went")
    assert 0 <= entry["queue_milliseconds"] <= entry["ttft_milliseconds"] <= entry["e2e_milliseconds"]
    assert (entry["status"], entry["generated_tokens"], entry["outcome"]) == (200, 6, "length")


def test_a_client_that_leaves_frees_the_real_engines_blocks(
    real_server: RunningServer, client: openai.OpenAI
) -> None:
    before = real_server.sample()
    with client.completions.create(
        model="tiny", prompt="abc", max_tokens=500, n=8, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    after = real_server.sample_until(lambda sample: sample["gauges"]["running"] == 0)
    assert after["gauges"]["kv_blocks_used"] == 0
    assert after["counters"]["aborted"] - before["counters"]["aborted"] == 8
    generated = after["counters"]["generated_tokens"] - before["counters"]["generated_tokens"]
    assert 1 <= generated < 8 * 500


def test_limits_change_while_requests_run(real_server: RunningServer, client: openai.OpenAI) -> None:
    before = real_server.sample()["counters"]["finished"]
    real_server.admin("PATCH", "limits", {"max_num_seqs": 1, "max_num_batched_tokens": 8})
    with client.completions.create(
        model="tiny", prompt=["abc " * 9] * 6, max_tokens=40, stream=True
    ) as stream:
        for number, _ in enumerate(stream):
            if number == 20:
                assert real_server.sample()["gauges"]["running"] <= 1
                real_server.admin("PATCH", "limits", {"max_num_seqs": 8, "max_num_batched_tokens": 512})
    after = real_server.sample()
    assert after["counters"]["finished"] - before == 6
    assert after["limits"] == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "num_speculative_tokens": 0,
    }
    real_server.admin("PATCH", "limits", {"max_num_batched_tokens": 2048})
