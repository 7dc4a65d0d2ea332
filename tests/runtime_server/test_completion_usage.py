"""What the usage of an answer says, at its end and with every chunk, and how many tokens were cached."""

from __future__ import annotations

from typing import Any

import openai
from tests.runtime_server.completion_requests import chat, complete, refusal, tokens_of


def test_usage_comes_at_the_end_or_with_every_chunk(repeating_client: openai.OpenAI) -> None:
    def usages(**stream_options: bool) -> list[Any]:
        chunks: Any = complete(
            repeating_client, ["one", "two two"], max_tokens=3, stream=True, stream_options=stream_options
        )
        return [chunk.usage for chunk in chunks]

    assert all(usage is None for usage in usages(include_usage=False))
    # OpenAI's padding of streams may be declined, and is not to be had.
    assert usages(include_usage=True, include_obfuscation=False)[-1] is not None
    padded = refusal(repeating_client, stream=True, stream_options={"include_obfuscation": True})
    assert padded.param == "stream_options.include_obfuscation"
    *during, last = usages(include_usage=True)
    assert all(usage is None for usage in during)
    assert (last.completion_tokens, last.prompt_tokens) == (
        6,
        3 + len(tokens_of(repeating_client, "two two")),
    )
    *during, last = usages(include_usage=True, continuous_usage_stats=True)
    assert sorted(usage.completion_tokens for usage in during) == [1, 1, 2, 2, 3, 3]
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in during)
    assert last.completion_tokens == 6
    running = usages(continuous_usage_stats=True)
    assert sorted(usage.completion_tokens for usage in running) == [1, 1, 2, 2, 3, 3, 6]
    declined = {"include_usage": False, "continuous_usage_stats": True}
    at_odds = refusal(repeating_client, stream=True, stream_options=declined)
    assert at_odds.param == "stream_options.continuous_usage_stats"


def test_every_chunk_of_a_chat_has_the_usage_if_asked_for(repeating_client: openai.OpenAI) -> None:
    asked = {"continuous_usage_stats": True}
    chunks = list(chat(repeating_client, max_tokens=3, stream=True, stream_options=asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 2, 3, 3]
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    assert chunks[-1].choices == []


def test_cached_tokens_are_counted_once_per_prompt(repeating_client: openai.OpenAI) -> None:
    def cached(prompt: Any, **options: Any) -> int:
        usage: Any = complete(repeating_client, prompt, cache_salt="counted", max_tokens=1, **options).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    first, second = [60, 61, 62, 63], [70, 71, 72]
    assert cached(first) == 0
    assert cached(first) == 3
    assert cached([first, second], n=2) == 3, "a prompt is not cached by its own later choices"
    assert cached([first, second], n=2) == 5


def test_a_cache_salt_parts_the_cache(repeating_client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int:
        options = {} if salt is None else {"cache_salt": salt}
        usage: Any = complete(repeating_client, [80, 81, 82], max_tokens=1, **options).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b"), cached(None)] == [
        0,
        2,
        0,
        0,
        2,
        2,
    ]
