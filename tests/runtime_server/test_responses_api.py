"""`/v1/responses` with the `openai` client against live servers."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from tests.runtime_server.conftest import connect

ECHO = "{# tools <tool_call> #}{{ messages[-1].content }}{{ eos_token }}"
DUMP = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %};"
    "{% endfor %}{{ eos_token }}"
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def with_template(start: Any, folder: Any, template: str) -> openai.OpenAI:
    path = folder / "template.jinja"
    path.write_text(template)
    return connect(start(f"--chat-template={path}"))


@pytest.fixture(scope="module")
def echo(start_shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with with_template(start_shared_server, tmp_path_factory.mktemp("echo"), ECHO) as client:
        yield client


@pytest.fixture(scope="module")
def dump(start_shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with with_template(start_shared_server, tmp_path_factory.mktemp("dump"), DUMP) as client:
        yield client


@pytest.fixture(scope="module")
def real(real_server: Any) -> Iterator[openai.OpenAI]:
    with connect(real_server) as client:
        yield client


def ask(client: openai.OpenAI, said: Any, **options: Any) -> Any:
    return client.responses.create(model="tiny", input=said, **options)


def test_a_text_is_answered(echo: openai.OpenAI) -> None:
    response = ask(echo, "Hello there", metadata={"run": "7"}, store=True, temperature=0.5)
    assert response.output_text == "Hello there"
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.id.startswith("resp_")
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.content[0].annotations == []
    assert (response.metadata, response.temperature, response.top_p) == ({"run": "7"}, 0.5, 1.0)
    assert response.model_extra["store"] is False, "nothing is kept, whatever was asked for"
    usage = response.usage
    assert usage.input_tokens == usage.output_tokens > 1, "the engine repeats its prompt"
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_response_cut_at_its_length_is_incomplete(echo: openai.OpenAI) -> None:
    response = ask(echo, "one two three four", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3
    assert "one two three four".startswith(response.output_text)
    events = list(ask(echo, "one two three four", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_events_come_in_their_order(echo: openai.OpenAI) -> None:
    events = list(ask(echo, "Hello there", stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas >= 2
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[2].item.status == "in_progress"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    done, last = events[-4], events[-1]
    assert "".join(deltas) == done.text == last.response.output_text == "Hello there"
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.response.output[0].id}
    assert last.response.usage.output_tokens > 0
    assert last.response.status == "completed"


def test_a_call_is_an_item_of_its_own(echo: openai.OpenAI) -> None:
    response = ask(echo, f"Let me see. {CALL}", tools=[WEATHER])
    message, call = response.output
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert call.call_id != call.id
    assert response.tools[0].name == "get_weather"


def test_a_call_is_streamed(echo: openai.OpenAI) -> None:
    with echo.responses.stream(model="tiny", input=CALL, tools=[WEATHER]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.function_call_arguments.delta")
    assert num_deltas >= 2
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * num_deltas,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (call,) = final.output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Paris"}


def test_a_conversation_is_sent_as_items(dump: openai.OpenAI) -> None:
    first = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}", "id": "fc_1"}
    second = {**first, "call_id": "c2", "arguments": '{"a": 1}', "status": "completed"}
    response = ask(
        dump,
        [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Yes?", "annotations": []}],
            },
            first,
            second,
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        instructions="Be brief.",
    )
    assert response.output_text == ('system=Be brief.;user=Hi;assistant=Yes?[c1 {}][c2 {"a": 1}];tool=rain;')
    assert response.instructions == "Be brief."


@pytest.mark.parametrize("dumped", [lambda item: item, lambda item: item.model_dump()], ids=["item", "dump"])
def test_an_output_is_input_again(echo: openai.OpenAI, dumped: Any) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    first = ask(echo, f"Let me see. {CALL}", tools=[WEATHER], **wanted)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items: list[Any] = [*map(dumped, first.output), output]
    tools: list[Any] = [WEATHER]
    again = echo.responses.create(model="tiny", input=items, tools=tools)
    assert again.output_text == "rain"


def test_log_probabilities_go_with_the_text(echo: openai.OpenAI) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = ask(echo, "Hello there", **options)
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert logprobs[0].token == logprobs[0].top_logprobs[0].token
    events = list(ask(echo, "Hello there", stream=True, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert len(done.logprobs) == len(logprobs)
    streamed = [one.token for event in deltas for one in event.logprobs]
    assert "".join(streamed) == "Hello there"
    assert [*streamed, "<|eos|>"] == [one.token for one in done.logprobs]


def test_without_parallel_calls_the_first_one_is_all(echo: openai.OpenAI) -> None:
    response = ask(echo, f"{CALL}{CALL}", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["function_call"]
    assert response.parallel_tool_calls is False
    assert len(ask(echo, f"{CALL}{CALL}", tools=[WEATHER], parallel_tool_calls=True).output) == 2


def test_what_asks_for_nothing_is_accepted(echo: openai.OpenAI) -> None:
    response = ask(
        echo,
        "Hello",
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        truncation="disabled",
        reasoning={"effort": "none"},
        background=False,
    )
    assert response.output_text == "Hello"
    assert (response.user, response.metadata, response.service_tier) == ("u", {"a": "b"}, "default")


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    size: int = pydantic.Field(ge=0, le=99)


def test_an_answer_of_a_schema_is_parsed(real: openai.OpenAI) -> None:
    response = real.responses.parse(
        model="tiny", input="A city", text_format=City, max_output_tokens=300, extra_body={"seed": 3}
    )
    assert isinstance(response.output_parsed, City)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    schema = City.model_json_schema()
    form = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}
    plain = ask(real, "A city", text=form, max_output_tokens=300, extra_body={"seed": 4})
    City.model_validate_json(plain.output_text)
    assert plain.text.format.name == "city"
    free = ask(real, "A city", text={"format": {"type": "text"}}, max_output_tokens=30)
    assert free.text.format.type == "text"


def test_a_named_function_is_called(real: openai.OpenAI) -> None:
    schema = {**City.model_json_schema(), "additionalProperties": False}
    tool = {**WEATHER, "parameters": schema, "strict": False}
    choice = {"type": "function", "name": "get_weather"}
    response = ask(
        real, "Hi", tools=[tool], tool_choice=choice, max_output_tokens=300, extra_body={"seed": 3}
    )
    (call,) = response.output
    City.model_validate_json(call.arguments)


@pytest.mark.parametrize(
    ("options", "want_param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.summary"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": "x" * 20_000}, "input"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    echo: openai.OpenAI, options: dict[str, Any], want_param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        echo.responses.create(**{"model": "tiny", "input": "x", **options})
    assert (caught.value.param or "").startswith(want_param), caught.value.message


def test_no_response_is_kept(echo: openai.OpenAI) -> None:
    response = ask(echo, "Hello")
    for method in (echo.responses.retrieve, echo.responses.delete, echo.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            method(response.id)
        assert caught.value.code == "response_not_found"


def test_a_stream_that_fails_ends_with_response_failed(echo: openai.OpenAI) -> None:
    # The fake engine takes a prompt that begins with this token for a wish to fail after two tokens.
    events = list(ask(echo, "#abcd", stream=True))
    last = events[-1]
    assert last.type == "response.failed", events
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert "asked to fail" in last.response.error.message
