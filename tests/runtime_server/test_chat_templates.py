"""What chat templates are given over HTTP: by one that writes all of it, and by the requests' own."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.runtime_server.conftest import connect

DUMP = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}{{ documents | tojson }}"
    "{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}{{ add_generation_prompt }}"
    "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
)
NOW = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.fixture(scope="module")
def dump(start_shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Its template writes all that it is given."""
    template = tmp_path_factory.mktemp("template") / "dump.jinja"
    template.write_text(DUMP)
    server = start_shared_server(f"--chat-template={template}", "--trust-request-chat-template")
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def dump_root(dump: openai.OpenAI) -> openai.OpenAI:
    """The same, asked beside /v1 instead of below it."""
    return dump.with_options(base_url=str(dump.base_url).removesuffix("v1/"))


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], **options
    )


def test_a_conversation_with_calls_reaches_the_template(dump_root: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ],
        "tools": [{**NOW, "function": {**NOW["function"], "strict": True}}],  # type: ignore[dict-item]
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": {"mood": "calm"},
        "add_generation_prompt": False,
    }
    parsed_call = {**call, "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    want_messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [parsed_call], "reasoning_content": "hm"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    want_documents = '[{"title": "t", "text": "x"}]'
    assert prompt_of(dump_root, body) == (
        f"{json.dumps([NOW])}{json.dumps(want_messages)}{want_documents}calmFalse"
    )
    own = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages[0].content * 3 }}"}
    assert prompt_of(dump_root, own) == "aaa"
    final = {"role": "assistant", "content": "One, two, "}
    going_on = {"messages": [{"role": "user", "content": "Count"}, final], "continue_final_message": True}
    assert prompt_of(dump_root, going_on).endswith('"content": "One, two, ')


def prompt_of(client: openai.OpenAI, body: dict[str, Any]) -> str:
    tokens: Any = client.post("/tokenize", cast_to=object, body=body)
    answer: Any = client.post("/detokenize", cast_to=object, body={"tokens": tokens["tokens"]})
    return str(answer["prompt"])


def test_the_template_reads_fields_of_its_own(dump: openai.OpenAI) -> None:
    body = {"documents": [{"text": "x"}], "chat_template_kwargs": {"mood": "calm"}}
    want = '[{"role": "user", "content": "Hi"}][{"text": "x"}]calm'
    assert ask(dump, "Hi", tools=[], extra_body=body).choices[0].message.content == f"{want}True"
    # Without its cue to the assistant this template has no end either, and the engine begins again.
    body["add_generation_prompt"] = False  # type: ignore[assignment]
    text = ask(dump, "Hi", tools=[], max_tokens=100, extra_body=body).choices[0].message.content
    assert text.startswith(f"{want}False[{{")


def test_the_template_is_told_how_much_to_think(dump: openai.OpenAI) -> None:
    def told(effort: Any, **variables: Any) -> str:
        answer = ask(
            dump, "Hi", tools=[], reasoning_effort=effort, extra_body={"chat_template_kwargs": variables}
        )
        return str(answer.choices[0].message.content).partition("null")[2]

    assert told("high") == "highTrueTrue"
    assert told("none") == "noneFalseTrue"
    assert told("low", enable_thinking=False) == "lowFalseTrue"
    assert told(None, reasoning_effort="medium") == "mediumTrue"
    plain = ask(dump, "Hi", tools=[], verbosity="medium").choices[0].message.content
    assert plain.endswith("nullTrue")


def test_a_message_can_be_continued(dump: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One, two, "},
    ]
    completion = dump.chat.completions.create(
        model="tiny", messages=messages, max_tokens=120, extra_body={"continue_final_message": True}
    )
    text = completion.choices[0].message.content
    assert text is not None
    # The engine repeats the prompt, which ends within the message.
    assert '"content": "One, two, [{"role": "user"' in text


def test_trusting_servers_take_templates_of_requests(dump: openai.OpenAI) -> None:
    template = "{{ messages[0].content | upper }}{{ eos_token }}"
    answer = ask(dump, "hello", extra_body={"chat_template": template})
    assert answer.choices[0].message.content == "HELLO"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(dump, "hello", extra_body={"chat_template": "{% if %}"})
    assert caught.value.param == "chat_template"
