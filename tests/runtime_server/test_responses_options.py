"""What each option that /v1/responses shares with chats does to a response, by the `openai` client.

Every option is shown by its own effect, and that a chat with the same option says the same. The engine with
random weights is led by biases; the one that repeats its prompt shows what the model was given.
"""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import RunningServer, StartServer

DUMP = (
    "{{ messages | tojson }}{{ documents | tojson }}{{ mood }}{{ reasoning_effort }}"
    "{{ add_generation_prompt }}{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
)
# The 51st token is a single printed character, and the second is the end of an answer.
ONE, TWO, END = "50", "60", "1"
ALWAYS_ONE: dict[str, Any] = {"logit_bias": {ONE: 100}}
AT_ONCE: dict[str, Any] = {"logit_bias": {END: 100}}


@pytest.fixture(scope="module")
def dump(
    start_shared_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """Repeats all that its template is given, and takes templates of requests."""
    template = tmp_path_factory.mktemp("template") / "dump.jinja"
    template.write_text(DUMP)
    server = start_shared_server(f"--chat-template={template}", "--trust-request-chat-template")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def narrow_server(start_shared_server: StartServer) -> RunningServer:
    """The real engine, with room for one request at a time."""
    return start_shared_server("--max-num-seqs=1", "--num-threads=1", fake=False)


@pytest.fixture(scope="module")
def narrow(narrow_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{narrow_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def call(create: Any, options: dict[str, Any]) -> Any:
    """The options that the client does not know go into the body all the same."""
    known = inspect.signature(create).parameters
    own = {name: value for name, value in options.items() if name in known}
    return create(model="tiny", extra_body={k: v for k, v in options.items() if k not in known}, **own)


def respond(client: openai.OpenAI, said: Any = "Hi", **options: Any) -> Any:
    return call(client.responses.create, {"input": said, "max_output_tokens": 12, **options})


def chat(client: openai.OpenAI, text: str = "Hi", **options: Any) -> Any:
    """The same as a chat."""
    messages = [{"role": "user", "content": text}]
    return call(client.chat.completions.create, {"messages": messages, "max_tokens": 12, **options})


# Each option with a value, and what is asked for besides so that it shows.
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"top_p": 0.0001}, {}),
    ({"top_k": 1}, {}),
    ({"min_p": 1.0}, {}),
    ({"presence_penalty": 2.0}, {"temperature": 0, "logit_bias": {ONE: 80, TWO: 79.5}}),
    ({"frequency_penalty": 2.0}, {"temperature": 0, "logit_bias": {ONE: 80, TWO: 77}}),
    ({"repetition_penalty": 10}, {"temperature": 0}),
    ({"logit_bias": {ONE: 100}}, {}),
    ({"allowed_token_ids": [50, 60]}, {}),
    ({"seed": 12}, {}),
    ({"structured_outputs": {"regex": "[xyz]{4}"}}, {"ignore_eos": False}),
]


@pytest.mark.parametrize(("option", "others"), SAMPLING, ids=[next(iter(one)) for one, _ in SAMPLING])
def test_a_sampling_option_changes_the_tokens_as_it_does_in_chats(
    openai_client: openai.OpenAI, option: dict[str, Any], others: dict[str, Any]
) -> None:
    plain = {"seed": 11, "ignore_eos": True, **others}
    changed = {**plain, **option}
    without, with_it = (
        respond(openai_client, **plain).output_text,
        respond(openai_client, **changed).output_text,
    )
    assert with_it != without
    assert with_it == chat(openai_client, **changed).choices[0].message.content
    assert without == chat(openai_client, **plain).choices[0].message.content
    assert with_it == respond(openai_client, **changed).output_text, "a seed gives the same again"


def test_the_narrowest_choices_are_greedy_and_only_allowed_tokens_come(openai_client: openai.OpenAI) -> None:
    options = {"seed": 3, "ignore_eos": True}
    greedy = respond(openai_client, temperature=0, **options).output_text
    for option in ({"top_p": 0.0001}, {"top_k": 1}, {"min_p": 1.0}):
        assert respond(openai_client, temperature=2, **option, **options).output_text == greedy
    one = respond(openai_client, **ALWAYS_ONE, **options).output_text
    two = respond(openai_client, logit_bias={TWO: 100}, **options).output_text
    assert (one, two) == (one[0] * 12, two[0] * 12)
    both = respond(openai_client, allowed_token_ids=[50, 60], **options).output_text
    assert set(both) == {one[0], two[0]}
    other = respond(openai_client, allowed_token_ids=[50, 60], bad_words=[one[0]], **options).output_text
    assert set(other) == {two[0]}
    shaped = respond(openai_client, structured_outputs={"regex": "[xyz]{4}"}, seed=3).output_text
    assert len(shaped) == 4
    assert set(shaped) <= set("xyz")


def test_stop_strings_end_the_text_before_or_after_themselves(openai_client: openai.OpenAI) -> None:
    whole = respond(openai_client, **ALWAYS_ONE)
    letter = whole.output_text[0]
    assert (whole.status, whole.output_text) == ("incomplete", letter * 12)
    stopped = respond(openai_client, stop=letter * 3, **ALWAYS_ONE)
    assert (stopped.status, stopped.output_text) == ("completed", "")
    kept = respond(openai_client, stop=[letter * 3], include_stop_str_in_output=True, **ALWAYS_ONE)
    assert (kept.status, kept.output_text) == ("completed", letter * 3)


def test_stop_tokens_and_ends_count_as_asked(openai_client: openai.OpenAI) -> None:
    def ended(**options: Any) -> tuple[str, int]:
        response = respond(openai_client, **options)
        return response.status, response.usage.output_tokens

    assert ended(**ALWAYS_ONE) == ("incomplete", 12)
    assert ended(stop_token_ids=[int(ONE)], **ALWAYS_ONE) == ("completed", 1)
    assert ended(**AT_ONCE) == ("completed", 1)
    assert ended(ignore_eos=True, **AT_ONCE) == ("incomplete", 12)
    assert ended(min_tokens=5, **AT_ONCE) == ("completed", 6)


def test_special_tokens_are_spelled_if_they_are_not_to_be_skipped(repeating_client: openai.OpenAI) -> None:
    options = {"ignore_eos": True, "max_output_tokens": 40}
    assert "<|bos|>" not in respond(repeating_client, **options).output_text
    spelled = respond(repeating_client, skip_special_tokens=False, **options).output_text
    assert spelled.startswith("<|bos|><|user|>Hi<|eos|>")


def test_a_prompt_is_truncated_from_either_side(repeating_client: openai.OpenAI) -> None:
    """The engine repeats what it is given."""
    options = {"ignore_eos": True, "skip_special_tokens": False, "max_output_tokens": 4}
    text = "abcdefgh"
    whole = respond(repeating_client, text, **{**options, "max_output_tokens": 60})
    for side, want in (
        ({}, "end"),
        ({"truncation_side": "left"}, "end"),
        ({"truncation_side": "right"}, "start"),
    ):
        cut = respond(repeating_client, text, truncate_prompt_tokens=4, **side, **options)
        assert cut.usage.input_tokens == 4
        assert cut.output_text
        prompt = f"<|bos|><|user|>{text}<|eos|><|assistant|>"
        assert prompt.endswith(cut.output_text) if want == "end" else prompt.startswith(cut.output_text)
    assert whole.usage.input_tokens > 4
    fitting = respond(repeating_client, "long " * 900, truncate_prompt_tokens=-1, **options)
    assert fitting.usage.input_tokens + fitting.usage.output_tokens == 512


def test_tokens_can_be_written_as_ids(openai_client: openai.OpenAI) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, **ALWAYS_ONE}
    named = respond(openai_client, return_tokens_as_token_ids=True, **options)
    assert {one.token for one in named.output[0].content[0].logprobs} == {f"token_id:{ONE}"}
    plain = respond(openai_client, **options)
    assert {one.token for one in plain.output[0].content[0].logprobs} == {plain.output_text[0]}


def test_usage_says_where_the_time_went_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    whole = respond(openai_client, return_timings=True, **ALWAYS_ONE)
    *_, last = respond(openai_client, return_timings=True, stream=True, **ALWAYS_ONE)
    for usage in (whole.usage, last.response.usage):
        timings = usage.model_extra["headway"]
        assert (
            0 <= timings["queue_milliseconds"] <= timings["ttft_milliseconds"] <= timings["e2e_milliseconds"]
        )
    assert "headway" not in respond(openai_client).usage.model_extra


def test_a_request_id_becomes_the_responses(repeating_client: openai.OpenAI) -> None:
    assert respond(repeating_client, request_id="mine-7").id == "resp_mine-7"


def test_a_salt_parts_the_cache(openai_client: openai.OpenAI) -> None:
    def cached(**options: Any) -> int:
        response = respond(openai_client, "the same beginning " * 8, **options)
        count = response.usage.input_tokens_details.cached_tokens
        assert isinstance(count, int)
        return count

    assert cached(cache_salt="one of a kind") == 0
    assert cached(cache_salt="one of a kind") > 16
    assert cached(cache_salt="another") == 0


def test_the_lowest_priority_goes_first(narrow: openai.OpenAI, narrow_server: RunningServer) -> None:
    # A hundred choices, one after the other: they last until they are given up.
    blocker = narrow.completions.create(
        model="tiny",
        prompt="a",
        n=100,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True, "priority": -100},
    )
    next(iter(blocker))
    received = narrow_server.sample()["counters"]["received"]
    ended: list[int] = []
    lock = threading.Lock()

    def run(priority: int) -> None:
        respond(narrow, priority=priority, ignore_eos=True, max_output_tokens=30)
        with lock:
            ended.append(priority)

    def wait_for(count: int) -> None:
        narrow_server.sample_until(lambda sample: sample["counters"]["received"] == count)

    with ThreadPoolExecutor(3) as pool:
        for count, priority in enumerate((5, 0, -5), 1):
            pool.submit(run, priority)
            wait_for(received + count)
        blocker.close()
    assert ended == [-5, 0, 5]


def test_the_template_reads_fields_of_its_own(dump: openai.OpenAI) -> None:
    said = '[{"role": "user", "content": "Hi"}]'
    options: dict[str, Any] = {"max_output_tokens": 200}
    assert respond(dump, **options).output_text == f"{said}nullTrue"
    documents = [{"text": "x"}]
    assert respond(dump, documents=documents, **options).output_text == f'{said}[{{"text": "x"}}]True'
    calm = {"mood": "calm"}
    assert respond(dump, chat_template_kwargs=calm, **options).output_text == f"{said}nullcalmTrue"
    thinking = respond(dump, reasoning={"effort": "low"}, **options)
    assert (thinking.output_text, thinking.reasoning.effort) == (f"{said}nulllowTrue", "low")
    # Without its cue to the assistant this template has no end either, and the engine begins again.
    bare = respond(dump, add_generation_prompt=False, **options).output_text
    assert bare.startswith(f"{said}nullFalse[{{")
    own = respond(dump, chat_template="{{ messages[0].content * 3 }}{{ eos_token }}", **options)
    assert own.output_text == "HiHiHi"


def test_an_item_can_be_continued(dump: openai.OpenAI) -> None:
    items = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two, "}]
    response = respond(dump, items, continue_final_message=True, max_output_tokens=120)
    # The engine repeats the prompt, which ends within the message.
    assert '"content": "One, two, [{"role": "user"' in response.output_text


@pytest.mark.parametrize(
    ("option", "want"),
    [
        ({"n": 2}, "send the request several times"),
        ({"best_of": 2}, "send the request several times"),
        ({"echo": True}, "/v1/completions"),
        ({"logprobs": True}, "use include=['message.output_text.logprobs'] and top_logprobs"),
        ({"max_tokens": 5}, "use max_output_tokens"),
        ({"max_completion_tokens": 5}, "use max_output_tokens"),
        ({"max_tool_calls": 1}, "parallel_tool_calls=false"),
        ({"messages": []}, "use input"),
        ({"prompt_logprobs": 1}, "use /v1/chat/completions"),
        ({"return_token_ids": True}, "use /v1/chat/completions"),
        ({"response_format": {"type": "json_object"}}, "use text.format"),
        ({"stream_options": {"include_usage": True}}, "the last event of a stream has the usage"),
        ({"guided_json": {}}, "use structured_outputs"),
        ({"truncation": "auto"}, "send truncate_prompt_tokens"),
    ],
)
def test_what_is_not_served_here_comes_with_the_way_out(
    repeating_client: openai.OpenAI, option: dict[str, Any], want: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(repeating_client, **option)
    assert (caught.value.param, caught.value.code) == (next(iter(option)), "unsupported_parameter")
    assert want in caught.value.message


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"input": "x" * 20_000}, "input has more than"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
         "structured_outputs={'regex': 'a'} prescribes the answer, as text.format does"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message=True ex"),
        ({"truncation_side": "left"}, "truncation_side='left' is only allowed with truncate_prompt_tokens"),
        ({"top_logprobs": 2}, "top_logprobs=2 is only allowed with include="),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type='reasoning' is not one of"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type='item_reference' is not one of"),
        ({"input": []}, "input=[] is empty; send a string, or a list of one or more items"),
    ],
)  # fmt: skip
def test_an_error_is_told_in_the_words_of_this_endpoint(
    dump: openai.OpenAI, options: dict[str, Any], want: str
) -> None:
    check_refusal(dump, options, want)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": {"not": {}}}}},
         "text.format='{\"not\": {}}' cannot be enforced"),
        ({"tools": [{"type": "function", "name": "lost", "parameters": {"not": {}}, "strict": True}],
          "tool_choice": "required"},
         "tools[0].parameters='{\"type\": \"object\", \"not\": {}}' of tool 'lost' cannot be"),
    ],
)  # fmt: skip
def test_so_is_one_that_only_the_engine_finds(
    openai_client: openai.OpenAI, options: dict[str, Any], want: str
) -> None:
    check_refusal(openai_client, options, want)


def check_refusal(client: openai.OpenAI, options: dict[str, Any], want: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **options)
    message = caught.value.message.partition(" - ")[2]
    assert message.startswith(want), message
    assert message.startswith(caught.value.param or "nothing")
    for name in ("messages", "response_format", "function."):
        assert name not in message
