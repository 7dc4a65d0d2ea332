"""What each option does to an answer, by the `openai` client and an engine that repeats the prompt.

What the tokens are is known here; which tokens the real engine chooses is in `test_sampling_options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from tests.runtime_server.completion_requests import PROMPT, chat, complete, refusal, tokens_of

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer


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
