"""What each option does to an answer, by the `openai` client and an engine that repeats the prompt.

What the tokens are is known here; which tokens the real engine chooses is in `test_sampling_options`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from openai.types import Completion
    from tests.runtime_server.conftest import RunningServer

PROMPT = "one two ### three"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Completion:
    """A completion; options that the client has no argument for go into the body."""
    known, extra = split(client.completions.create, options)
    completion: Completion = client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **known)
    return completion


def chat(client: openai.OpenAI, content: str = PROMPT, /, **options: Any) -> Any:
    known, extra = split(client.chat.completions.create, options)
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], extra_body=extra, **known
    )


def split(method: Callable[..., Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = inspect.signature(method).parameters
    known = {name: value for name, value in options.items() if name in parameters}
    return known, {name: value for name, value in options.items() if name not in parameters}


def tokens_of(client: openai.OpenAI, prompt: str, **options: Any) -> list[int]:
    answer = client.with_options(base_url=str(client.base_url).removesuffix("/v1/")).post(
        "/tokenize", cast_to=object, body={"prompt": prompt, **options}
    )
    assert isinstance(answer, dict)
    tokens = answer["tokens"]
    assert isinstance(tokens, list)
    return tokens


def refusal(client: openai.OpenAI, **options: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    return caught.value


def test_max_tokens_ends_the_answer_and_has_openais_default(repeating_client: openai.OpenAI) -> None:
    assert complete(repeating_client).usage.completion_tokens == 16  # type: ignore[union-attr]
    three = complete(repeating_client, max_tokens=3)
    assert (three.choices[0].text, three.choices[0].finish_reason) == ("one", "length")
    for options in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        answer = chat(repeating_client, **options)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")


def test_the_prompt_may_be_texts_or_token_ids(repeating_client: openai.OpenAI) -> None:
    ids = tokens_of(repeating_client, PROMPT)
    texts = [
        [choice.text for choice in complete(repeating_client, prompt=prompt, max_tokens=len(ids)).choices]
        for prompt in (PROMPT, [PROMPT, PROMPT], ids, [ids, ids])
    ]
    assert texts == [[PROMPT], [PROMPT] * 2, [PROMPT], [PROMPT] * 2]


def test_messages_reach_the_model_by_its_template(repeating_client: openai.OpenAI) -> None:
    rendered = f"<|bos|><|system|>Be brief<|eos|><|user|>{PROMPT}<|eos|><|assistant|>"
    answer: Any = repeating_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": PROMPT}],
        max_tokens=100,
        extra_body={"return_token_ids": True},
    )
    assert answer.prompt_token_ids == tokens_of(repeating_client, rendered)


def test_an_answer_without_content_can_be_sent_back(repeating_client: openai.OpenAI) -> None:
    rendered = "<|bos|><|user|>one<|eos|><|assistant|><|eos|><|user|>two<|eos|><|assistant|>"
    cut: Any = {"role": "assistant", "content": None, "refusal": None}
    answer: Any = repeating_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "one"}, cut, {"role": "user", "content": "two"}],
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    assert answer.prompt_token_ids == tokens_of(repeating_client, rendered)


def test_n_choices_are_numbered_and_end_once_each(repeating_client: openai.OpenAI) -> None:
    completion = complete(repeating_client, ["one", "two"], n=3, max_tokens=3)
    assert [(one.index, one.text) for one in completion.choices] == [
        (index, "one" if index < 3 else "two") for index in range(6)
    ]
    ends: dict[int, int] = {}
    for chunk in complete(repeating_client, n=3, max_tokens=3, stream=True):
        for one in chunk.choices:  # type: ignore[attr-defined]
            ends[one.index] = ends.get(one.index, 0) + (one.finish_reason is not None)
    assert ends == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_end_the_text_before_or_after_themselves(
    repeating_client: openai.OpenAI, *, is_included: bool, is_streamed: bool
) -> None:
    options = {"stop": ["###", "nothing"], "include_stop_str_in_output": is_included, "max_tokens": 100}
    answer: Any = complete(repeating_client, **options, stream=is_streamed)
    choices = [chunk.choices[0] for chunk in answer] if is_streamed else [answer.choices[0]]
    assert "".join(one.text for one in choices) == ("one two ###" if is_included else "one two ")
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "###")
    assert all(one.stop_reason is None for one in choices[:-1])


def test_stop_token_ids_end_the_text_and_are_the_reason(repeating_client: openai.OpenAI) -> None:
    ids = tokens_of(repeating_client, "one two")
    options = {"max_tokens": 50, "stop_token_ids": [ids[3]], "logprobs": 0}
    (choice,) = complete(repeating_client, ids, **options).choices
    assert (choice.text, choice.finish_reason) == ("one", "stop")
    assert choice.stop_reason == ids[3]  # type: ignore[attr-defined]
    assert len(choice.logprobs.tokens) == 4  # type: ignore[union-attr,arg-type]
    (choice,) = complete(repeating_client, ids, **options, include_stop_str_in_output=True).choices
    assert choice.text == "one t"


def test_ignore_eos_goes_on_and_min_tokens_goes_on_for_a_while(repeating_client: openai.OpenAI) -> None:
    def ended(**options: Any) -> tuple[int, str, Any]:
        answer = complete(repeating_client, [40, 41, 1, 42], max_tokens=8, **options)
        choice: Any = answer.choices[0]
        return answer.usage.completion_tokens, choice.finish_reason, choice.stop_reason  # type: ignore[union-attr]

    assert ended() == (3, "stop", None), "the model's own end is no reason worth naming"
    assert ended(ignore_eos=True) == (8, "length", None)
    assert ended(ignore_eos=True, stop_token_ids=[1]) == (3, "stop", 1)
    assert ended(min_tokens=3) == (7, "stop", None)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_special_tokens_are_spelled_if_they_are_not_to_be_skipped(
    repeating_client: openai.OpenAI, *, is_streamed: bool
) -> None:
    def text(**options: Any) -> str:
        answer: Any = complete(repeating_client, [0, 40, 0, 41], max_tokens=4, stream=is_streamed, **options)
        parts = answer if is_streamed else [answer]
        return "".join(part.choices[0].text for part in parts)

    plain = text()
    assert "<|bos|>" not in plain
    assert text(skip_special_tokens=False) == f"<|bos|>{plain[0]}<|bos|>{plain[1]}"
    # The same text either way: the model's tokenizer puts no spaces there.
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False).count(" ") == plain.count(" ")


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


def test_a_prompt_is_truncated_from_either_side(repeating_client: openai.OpenAI) -> None:
    ids = tokens_of(repeating_client, PROMPT)

    def kept(**options: Any) -> Any:
        answer: Any = complete(repeating_client, PROMPT, return_token_ids=True, max_tokens=1, **options)
        return answer.choices[0].prompt_token_ids

    assert kept(truncate_prompt_tokens=4) == ids[-4:]
    assert kept(truncate_prompt_tokens=4, truncation_side="right") == ids[:4]
    assert kept(truncate_prompt_tokens=400) == ids
    long: Any = complete(repeating_client, [50] * 600, truncate_prompt_tokens=-1, max_tokens=12)
    assert (long.usage.prompt_tokens, long.usage.completion_tokens) == (500, 12)
    text = complete(repeating_client, "word " * 600, truncate_prompt_tokens=3, echo=True, max_tokens=0)
    assert "word ".endswith(text.choices[0].text[-2:])
    assert text.usage.prompt_tokens == 3  # type: ignore[union-attr]
    hopeless = refusal(repeating_client, prompt="word " * 100_000, truncate_prompt_tokens=3)
    assert hopeless.code == "context_length_exceeded"


def test_a_request_id_becomes_the_answers(repeating_client: openai.OpenAI) -> None:
    assert complete(repeating_client, request_id="mine.1").id == "cmpl-mine.1"
    # Two that run at once with one id do not disturb each other.
    streams: list[Any] = [complete(repeating_client, request_id="twice", stream=True) for _ in range(2)]
    texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    assert texts[0] == texts[1] != ""


def test_the_header_names_the_answer_before_the_body_does(
    repeating_client: openai.OpenAI, fake_server: RunningServer
) -> None:
    named = {"X-Request-Id": "header.7"}
    assert complete(repeating_client, request_id="mine.1", extra_headers=named).id == "cmpl-header.7"
    # One that no log line can hold names nothing.
    unusable = {"X-Request-Id": "two words"}
    assert complete(repeating_client, request_id="mine.2", extra_headers=unusable).id == "cmpl-mine.2"
    # Without any, what the answer says is what the access log says.
    answer = complete(repeating_client)
    assert fake_server.access_entry(answer.id.removeprefix("cmpl-"))["status"] == 200


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


def test_what_asks_for_nothing_is_accepted(repeating_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "user": "me",
        "safety_identifier": "hash",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
    }
    plain = complete(repeating_client, max_tokens=4).choices[0].text
    assert complete(repeating_client, max_tokens=4, **options).choices[0].text == plain
    assert chat(repeating_client, max_tokens=4, **options).usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("options", "want_param"),
    [
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "allowed_token_ids"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"n": 2, "best_of": 65, "prompt": ["a", "b"]}, "best_of"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["word " * 1000] * 3000}, "prompt"),
        ({"prompt": [99999], "echo": True}, "prompt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    repeating_client: openai.OpenAI, options: dict[str, Any], want_param: str
) -> None:
    error = refusal(repeating_client, **options)
    assert (error.status_code, error.param, error.type) == (400, want_param, "invalid_request_error")
    assert want_param.split(".")[0] in str(error)


def test_models_go_by_the_names_they_are_served_under(
    repeating_client: openai.OpenAI, fake_server: RunningServer
) -> None:
    assert complete(repeating_client).model == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        repeating_client.completions.create(model="other", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
