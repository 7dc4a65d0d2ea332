"""Tools over HTTP with the `openai` client: whole and streamed, chosen by the model or forced on it.

The engine that repeats its prompt, with a template that is nothing but the last message, answers just what a
test wants it to answer. What a grammar has to force, the real engine with random weights is forced to.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.runtime_server.conftest import connect

from headway_runtime.errors import ConfigError
from headway_runtime.server.chat_options import ChatOptions, parser_name
from headway_runtime.server.options import parse_options

ECHO = "{# tools <tool_call> #}{{ messages[-1].content }}{{ eos_token }}"
CHAT_WITHOUT_TOOLS = "{{ messages[-1].content }}"
ECHO_LLAMA = '{# tools ipython "parameters": #}{{ messages[-1].content }}{{ eos_token }}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"$ref": "#/$defs/Unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["C", "F"]}},
        },
    },
}
NOW = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(start_shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "echo.jinja"
    template.write_text(ECHO)
    with connect(start_shared_server(f"--chat-template={template}")) as client:
        yield client


@pytest.fixture(scope="module")
def llama(start_shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "echo.jinja"
    template.write_text(ECHO_LLAMA)
    with connect(start_shared_server(f"--chat-template={template}")) as client:
        yield client


@pytest.fixture(scope="module")
def real(real_server: Any) -> Iterator[openai.OpenAI]:
    with connect(real_server) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    options = {"tools": [WEATHER, NOW], **options}
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], **options
    )


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


PARIS = ("get_weather", {"city": "Paris", "unit": "C"})


def test_a_call_becomes_a_tool_call(hermes: openai.OpenAI) -> None:
    completion = ask(hermes, f"Let me see.\n{CALL}")
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert calls_of(choice.message) == [PARIS]
    assert choice.message.tool_calls[0].type == "function"
    assert choice.message.tool_calls[0].id
    assert completion.usage.completion_tokens > 0


def test_several_calls_have_ids_of_their_own(hermes: openai.OpenAI) -> None:
    message = ask(hermes, f"{CALL}\n{NOW_CALL}").choices[0].message
    assert calls_of(message) == [PARIS, ("now", {})]
    assert message.content is None
    assert len({call.id for call in message.tool_calls}) == 2


def test_without_parallel_calls_the_first_one_is_all(hermes: openai.OpenAI) -> None:
    message = ask(hermes, f"{CALL}\n{NOW_CALL}", parallel_tool_calls=False).choices[0].message
    assert calls_of(message) == [PARIS]


def test_what_is_no_call_stays_content(hermes: openai.OpenAI) -> None:
    text = '<tool_call>{"name": get_weather}</tool_call> then'
    (choice,) = ask(hermes, text).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)


def test_tool_choice_none_reads_no_calls(hermes: openai.OpenAI) -> None:
    (choice,) = ask(hermes, CALL, tool_choice="none").choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)


def test_an_answer_cut_short_says_so(hermes: openai.OpenAI) -> None:
    (choice,) = ask(hermes, CALL, max_tokens=40).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert '{"city": "Paris", "unit": "C"}'.startswith(call.function.arguments)


def test_calls_are_streamed_as_they_come(hermes: openai.OpenAI) -> None:
    stream = ask(hermes, f"Hm. {CALL}{NOW_CALL}", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Hm."
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    begins = [piece for piece in pieces if piece.id is not None]
    assert [(piece.index, piece.type, piece.function.name) for piece in begins] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    first = [piece.function.arguments for piece in pieces if piece.index == 0]
    assert json.loads("".join(first)) == PARIS[1]
    assert len(first) > 5, "arguments come as they are made"
    first_call, first_content = (
        next(i for i, delta in enumerate(deltas) if delta.tool_calls),
        next(i for i, delta in enumerate(deltas) if delta.content),
    )
    assert first_content < first_call
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert chunks[-1].usage.completion_tokens > len(first)


def test_every_chunk_of_a_call_has_the_usage_if_asked_for(hermes: openai.OpenAI) -> None:
    asked = {"continuous_usage_stats": True}
    chunks = list(ask(hermes, f"Hm. {CALL}", stream=True, stream_options=asked))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1] > 5) == (0, True)
    pieces = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == PARIS[1]


def test_the_clients_own_stream_helper_puts_calls_together(hermes: openai.OpenAI) -> None:
    with hermes.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": CALL}],
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert calls_of(choice.message) == [PARIS]


def test_choices_of_one_answer_keep_their_calls_apart(hermes: openai.OpenAI) -> None:
    completion = ask(hermes, CALL, n=2)
    assert [calls_of(choice.message) for choice in completion.choices] == [[PARIS], [PARIS]]
    found: dict[int, str] = {0: "", 1: ""}
    for chunk in ask(hermes, CALL, n=2, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                found[choice.index] += call.function.arguments
    assert json.loads(found[0]) == json.loads(found[1]) == PARIS[1]


def test_log_probabilities_and_token_ids_go_with_calls(hermes: openai.OpenAI) -> None:
    body = {"return_token_ids": True}
    completion = ask(hermes, CALL, logprobs=True, extra_body=body)
    num_tokens = completion.usage.completion_tokens
    assert len(completion.choices[0].logprobs.content) == num_tokens
    chunks = list(ask(hermes, CALL, logprobs=True, stream=True, extra_body=body))
    entries = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    ids = [
        one for chunk in chunks for c in chunk.choices for one in (c.model_extra or {}).get("token_ids") or []
    ]
    assert len(entries) == len(ids) == num_tokens


def test_llama_calls_are_found_behind_a_hidden_tag(llama: openai.OpenAI) -> None:
    call = '{"name": "get_weather", "parameters": {"city": "Paris", "unit": "C"}}'
    for text in (call, f"<|python_tag|>{call}"):
        (choice,) = ask(llama, text).choices
        assert calls_of(choice.message) == [PARIS]
        assert choice.finish_reason == "tool_calls"


def test_a_special_tag_without_a_call_is_hidden(llama: openai.OpenAI) -> None:
    (choice,) = ask(llama, "<|python_tag|>print(1)").choices
    assert (choice.message.content, choice.message.tool_calls) == ("print(1)", None)
    chunks = list(ask(llama, "<|python_tag|>print(1)", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "print(1)"


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_a_required_call_is_made_whatever_the_model(real: openai.OpenAI, way: str) -> None:
    for seed in range(3):
        options: Any = {
            "tool_choice": "required",
            "seed": seed,
            "parallel_tool_calls": False,
            "max_tokens": 400,
        }
        if way == "streamed":
            messages: Any = [{"role": "user", "content": "Hi"}]
            tools: Any = [WEATHER, NOW]
            with real.chat.completions.stream(
                model="tiny", messages=messages, tools=tools, **options
            ) as events:
                events.until_done()
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = ask(real, "Hi", **options).choices
        assert choice.finish_reason == "tool_calls"
        ((name, arguments),) = calls_of(choice.message)
        if name == "now":
            assert arguments == {}
        else:
            assert name == "get_weather"
            assert set(arguments) == {"city", "unit"}
            assert arguments["unit"] in ("C", "F")


def test_a_named_tool_is_called(real: openai.OpenAI) -> None:
    choice_of_tool = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = ask(real, "Hi", tool_choice=choice_of_tool, seed=1, max_tokens=400).choices
    ((name, arguments),) = calls_of(choice.message)
    assert (name, arguments["unit"] in ("C", "F"), choice.message.content) == ("get_weather", True, None)
    # As OpenAI and vLLM have it where the request named the function.
    assert choice.finish_reason == "stop"
    chunks = list(ask(real, "Hi", tool_choice=choice_of_tool, seed=1, max_tokens=400, stream=True))
    assert [reason for chunk in chunks if (reason := chunk.choices[0].finish_reason)] == ["stop"]


BOTH_ENDS = {"continue_final_message": True, "add_generation_prompt": True}
TWO_FORMS = {"tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}}


@pytest.mark.parametrize(
    ("options", "want_param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs"),
        ({"extra_body": BOTH_ENDS}, "continue_final_message"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        (TWO_FORMS, "structured_outputs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    hermes: openai.OpenAI, options: dict[str, Any], want_param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(hermes, "x", **options)
    assert (caught.value.param or "").startswith(want_param), caught.value.message


def test_a_model_of_unknown_calls_cannot_choose_to_make_any(fake_server: Any) -> None:
    with connect(fake_server) as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x")
    assert caught.value.param == "tools"
    assert "--tool-call-parser" in caught.value.message


def test_a_parser_that_must_be_known_and_is_not_ends_the_start(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        parser_name(ChatOptions(enable_auto_tool_choice=True), CHAT_WITHOUT_TOOLS)
    assert parser_name(ChatOptions(tool_call_parser="hermes"), CHAT_WITHOUT_TOOLS) == "hermes"
    assert parser_name(ChatOptions(enable_auto_tool_choice=False), ECHO) is None
    assert parser_name(ChatOptions(), ECHO) == "hermes"
    options = parse_options([str(model_folder), "--tool-call-parser=pythonic", "--enable-auto-tool-choice"])
    assert options.chat == ChatOptions(tool_call_parser="pythonic", enable_auto_tool_choice=True)


@pytest.mark.parametrize("forced", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_that_is_cut_has_no_content_whole_or_streamed(real: openai.OpenAI, forced: Any) -> None:
    for max_tokens in (1, 2, 6):
        options: Any = {"tool_choice": forced, "seed": 1, "max_tokens": max_tokens}
        (choice,) = ask(real, "Hi", **options).choices
        assert (choice.finish_reason, choice.message.content) == ("length", None)
        deltas = [chunk.choices[0].delta for chunk in ask(real, "Hi", stream=True, **options)]
        assert [delta.content for delta in deltas if delta.content is not None] == []


def test_a_call_that_a_stop_string_cuts_is_no_call(real: openai.OpenAI) -> None:
    for cut, want in (("city", "stop"), ("never said", "tool_calls")):
        options: Any = {
            "tools": [WEATHER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stop": [cut],
            "seed": 1,
            "max_tokens": 300,
        }
        assert ask(real, "Hi", **options).choices[0].finish_reason == want
        assert list(ask(real, "Hi", stream=True, **options))[-1].choices[0].finish_reason == want


def test_forced_calls_spend_no_token_on_white_space(real: openai.OpenAI, byte_level_tokenizer: Any) -> None:
    spaces = {str(byte_level_tokenizer.token_to_id(name)): 100.0 for name in ("Ġ", "Ċ", "ĉ", "č")}
    options: Any = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": spaces}
    (choice,) = ask(real, "Hi", temperature=0, max_tokens=150, logprobs=True, **options).choices
    written = "".join(entry.token for entry in choice.logprobs.content)
    assert choice.finish_reason == "tool_calls", written
    # The city is as the model likes it.
    outside = re.sub(r'("city": )"[^"]*"', r"\1C", written.removesuffix("<|eos|>"))
    calls = ['{"name": "now", "arguments": {}}'] + [
        f'{{"name": "get_weather", "arguments": {{"city": C, "unit": "{unit}"}}}}' for unit in "CF"
    ]
    assert outside in [f"[{call}]" for call in calls]
