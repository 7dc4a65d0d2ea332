"""Prompts and answers token by token: echo, log-probabilities and ids, by an engine that repeats prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.runtime_server.completion_requests import PROMPT, chat, complete, refusal, tokens_of


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_puts_the_prompt_before_the_answer(
    repeating_client: openai.OpenAI, *, is_streamed: bool
) -> None:
    prompt = "日本語 one"
    count = len(tokens_of(repeating_client, prompt))
    for given in (prompt, tokens_of(repeating_client, prompt)):
        answer: Any = complete(repeating_client, given, echo=True, max_tokens=count, stream=is_streamed)
        parts = list(answer) if is_streamed else [answer]
        assert "".join(part.choices[0].text for part in parts) == prompt * 2
        assert parts[-1].choices[0].logprobs is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_with_logprobs_scores_the_prompt(repeating_client: openai.OpenAI, *, is_streamed: bool) -> None:
    prompt = "one 日 two"
    ids = tokens_of(repeating_client, prompt)
    answer: Any = complete(repeating_client, prompt, echo=True, logprobs=1, max_tokens=2, stream=is_streamed)
    parts = [part.choices[0] for part in answer] if is_streamed else [answer.choices[0]]
    text = "".join(part.text for part in parts)
    assert text == prompt + "on"

    def joined(name: str) -> list[Any]:
        return [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]

    logprobs, offsets, tokens = joined("token_logprobs"), joined("text_offset"), joined("tokens")
    assert logprobs == [None, *(-place / 4 for place in range(1, len(ids))), -0.5, -0.5]
    assert len(offsets) == len(tokens) == len(joined("top_logprobs")) == len(ids) + 2
    assert joined("top_logprobs")[0] is None
    assert len(joined("top_logprobs")[1]) == 2, "the best one, and the prompt's own"
    for offset, token in zip(offsets, tokens, strict=True):
        if "\ufffd" not in token:
            assert text[offset:].startswith(token)
    assert offsets == sorted(offsets)


def test_echo_without_an_answer_scores_the_prompt_alone(repeating_client: openai.OpenAI) -> None:
    answer = complete(repeating_client, PROMPT, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    count = len(tokens_of(repeating_client, PROMPT))
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert len(choice.logprobs.tokens) == count  # type: ignore[union-attr,arg-type]
    assert answer.usage.completion_tokens == 0  # type: ignore[union-attr]
    assert refusal(repeating_client, max_tokens=0).status_code == 400


def test_prompt_logprobs_have_vllms_shape(repeating_client: openai.OpenAI) -> None:
    ids = tokens_of(repeating_client, "one two")
    answer: Any = complete(repeating_client, ids, prompt_logprobs=2, n=2, max_tokens=1)
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert len(rest) == len(ids) - 1
    for place, (token_id, entry) in enumerate(zip(ids[1:], rest, strict=True), 1):
        own = entry.pop(str(token_id))
        assert (own["logprob"], own["rank"]) == (-place / 4, 2)
        assert own["decoded_token"] in "one two"
        (best,) = entry.values()
        assert (best["logprob"], best["rank"]) == (-0.125, 1)
    assert len(answer.choices[1].prompt_logprobs) == len(ids), "every choice says them"
    chatted = chat(repeating_client, prompt_logprobs=0, max_tokens=1)
    assert chatted.prompt_logprobs[0] is None
    assert all(len(entry) == 1 for entry in chatted.prompt_logprobs[1:])
    assert refusal(repeating_client, prompt_logprobs=1, stream=True).status_code == 400


def test_logprobs_of_completions_hold_the_token_itself_and_the_best(repeating_client: openai.OpenAI) -> None:
    for wanted, count in ((0, 1), (1, 1), (2, 2)):
        (choice,) = complete(repeating_client, logprobs=wanted, max_tokens=3).choices
        logprobs = choice.logprobs
        assert logprobs is not None
        assert (logprobs.token_logprobs, logprobs.text_offset) == ([-0.5] * 3, [0, 1, 2])
        assert [len(top) for top in logprobs.top_logprobs or []] == [count] * 3
    assert complete(repeating_client).choices[0].logprobs is None


def test_top_logprobs_of_chats_are_as_many_as_asked_for(repeating_client: openai.OpenAI) -> None:
    for wanted in (0, 1, 2):
        content = (
            chat(repeating_client, logprobs=True, top_logprobs=wanted, max_tokens=2)
            .choices[0]
            .logprobs.content
        )
        assert [len(token.top_logprobs) for token in content] == [wanted] * 2
    for options in ({}, {"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}):
        assert chat(repeating_client, max_tokens=2, **options).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError) as caught:
        chat(repeating_client, top_logprobs=1)
    assert caught.value.param == "top_logprobs"


def test_tokens_can_be_written_as_ids(repeating_client: openai.OpenAI) -> None:
    ids = tokens_of(repeating_client, "one")
    (choice,) = complete(
        repeating_client, "one", logprobs=1, return_tokens_as_token_ids=True, max_tokens=3
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in ids]
    content = chat(repeating_client, logprobs=True, return_tokens_as_token_ids=True, max_tokens=1)
    assert content.choices[0].logprobs.content[0].token == "token_id:0"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_token_ids_come_along_if_asked_for(repeating_client: openai.OpenAI, *, is_streamed: bool) -> None:
    ids = tokens_of(repeating_client, PROMPT)
    options: dict[str, Any] = {"max_tokens": 5, "return_token_ids": True, "stream": is_streamed}
    answer: Any = complete(repeating_client, PROMPT, **options)
    parts = [part.choices[0] for part in answer] if is_streamed else [answer.choices[0]]
    assert parts[0].prompt_token_ids == ids
    assert [token_id for part in parts for token_id in part.token_ids] == ids[:5]
    chatted: Any = chat(repeating_client, **options)
    chunks = list(chatted) if is_streamed else [chatted]
    prompt = next(chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids"))
    answered = [part for chunk in chunks for part in getattr(chunk.choices[0], "token_ids", None) or []]
    assert answered == prompt[:5]
    plain: Any = complete(repeating_client, PROMPT)
    assert not hasattr(plain.choices[0], "token_ids")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_each_token_id_has_its_logprob_where_a_stop_string_cut_the_text(
    repeating_client: openai.OpenAI, *, is_streamed: bool
) -> None:
    options: dict[str, Any] = {"stop": ["e t"], "logprobs": 0, "max_tokens": 50, "stream": is_streamed}

    def pairs(**more: Any) -> tuple[str, list[float], list[int]]:
        answer: Any = complete(repeating_client, "one two", **options, **more)
        parts = [part.choices[0] for part in answer] if is_streamed else [answer.choices[0]]
        logprobs = [one for part in parts if part.logprobs for one in part.logprobs.token_logprobs]
        ids = [one for part in parts for one in getattr(part, "token_ids", None) or ()]
        return "".join(part.text for part in parts), logprobs, ids

    text, logprobs, ids = pairs(return_token_ids=True)
    assert (text, ids) == ("on", tokens_of(repeating_client, "one t"))
    assert len(logprobs) == len(ids)
    # Otherwise they go with the text.
    assert len(pairs()[1]) == len(tokens_of(repeating_client, "on"))
