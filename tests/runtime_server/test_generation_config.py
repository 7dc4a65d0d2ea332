"""A model's generation_config.json: what it says of sampling is the default of requests, and never more."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import openai
import pytest

from headway_runtime.errors import ConfigError
from headway_runtime.generation_defaults import GenerationDefaults
from headway_runtime.server.body import parse_body
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.options import parse_options
from headway_runtime.server.protocol import CompletionBody
from headway_runtime.server.sampling_fields import sampling_of
from headway_runtime.sources import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer

    from headway_runtime.request import SamplingParams

# With one token to choose from, every seed gives the same answer.
SAID = {
    "do_sample": False,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 1,
    "min_p": None,
    "max_new_tokens": 5,
    "eos_token_id": 1,
    "transformers_version": "4.50.0",
}
SEEDS = range(4)
OFF = ["--generation-config=none", "--generation-config=vllm"]


def write(folder: Path, said: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")


@pytest.fixture(scope="module")
def model_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the other tests, with a file of defaults."""
    folder = tmp_path_factory.mktemp("defaults") / "model"
    shutil.copytree(model_folder, folder)
    write(folder, SAID)
    return folder


@pytest.fixture(scope="module")
def server(start_shared_server: StartServer) -> RunningServer:
    return start_shared_server("--num-threads=1", fake=False)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def completion(client: openai.OpenAI, **options: Any) -> tuple[int, ...]:
    body = {"ignore_eos": True, "return_token_ids": True, **options}
    answer: Any = client.completions.create(model="tiny", prompt="Once", extra_body=body)
    return tuple(answer.choices[0].token_ids)


def chat(client: openai.OpenAI, **options: Any) -> tuple[int, ...]:
    body = {"ignore_eos": True, "return_token_ids": True, **options}
    messages: Any = [{"role": "user", "content": "Once"}]
    answer: Any = client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    return tuple(answer.choices[0].token_ids)


def response(client: openai.OpenAI, **options: Any) -> str:
    body = {"ignore_eos": True, "skip_special_tokens": False, **options}
    return client.responses.create(model="tiny", input="Once", extra_body=body).output_text


@pytest.mark.parametrize("ask", [completion, chat, response], ids=lambda ask: ask.__name__)
def test_what_a_request_leaves_out_is_the_files_and_what_it_sends_is_its_own(
    client: openai.OpenAI, ask: Any
) -> None:
    assert len({ask(client, seed=seed) for seed in SEEDS}) == 1
    assert len({ask(client, seed=seed, top_k=None, top_p=None) for seed in SEEDS}) == 1
    # As they are without a file: the very defaults, said aloud.
    usual = {"top_k": 0, "top_p": 1, "temperature": 1}
    assert len({ask(client, seed=seed, **usual) for seed in SEEDS}) == len(SEEDS)


def test_an_answers_length_is_the_files_where_nothing_else_bounds_it(client: openai.OpenAI) -> None:
    assert len(chat(client)) == len(chat(client, max_tokens=None)) == 5
    assert len(chat(client, max_tokens=9)) == len(chat(client, max_completion_tokens=9)) == 9
    assert len(completion(client)) == 16


def test_a_response_says_what_it_was_sampled_with(client: openai.OpenAI) -> None:
    one = client.responses.create(model="tiny", input="Once", extra_body={"ignore_eos": True})
    assert (one.temperature, one.top_p, one.max_output_tokens) == (0.7, 0.9, 5)
    assert one.usage is not None
    assert one.usage.output_tokens == 5
    one = client.responses.create(model="tiny", input="Once", temperature=1, top_p=1, max_output_tokens=7)
    assert (one.temperature, one.top_p, one.max_output_tokens) == (1, 1, 7)


def test_the_log_names_what_was_taken(server: RunningServer) -> None:
    (line,) = [line for line in server.log.splitlines() if "generation_config.json" in line]
    assert line.endswith(": temperature=0.7, top_p=0.9, top_k=1, max_new_tokens=5")


@pytest.mark.parametrize("flag", OFF)
def test_the_file_can_be_left_alone(model_folder: Path, flag: str) -> None:
    assert parse_options([str(model_folder), flag], {}).engine.defaults == GenerationDefaults()


def test_a_server_without_the_file_samples_as_openai_does(start_server: StartServer) -> None:
    server = start_server("--num-threads=1", OFF[0], fake=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert len({chat(client, seed=seed, max_tokens=9) for seed in SEEDS}) == len(SEEDS)
    assert "generation_config.json" not in server.log


def test_the_bundled_model_has_no_defaults_of_its_own() -> None:
    folder = resolve("bundled://headway-tiny")
    assert (folder / "generation_config.json").is_file()
    assert parse_options([str(folder)], {}).engine.defaults == GenerationDefaults()


FIELDS = [
    ("temperature", 0.3, 1, 1.0),
    ("temperature", 0, 1.0, 1.0),
    ("top_p", 0.5, 1, 1.0),
    ("top_k", 20, 0, 0),
    ("top_k", -1, 3, 3),
    ("min_p", 0.1, 0, 0.0),
    ("repetition_penalty", 1.05, 1, 1.0),
]


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
@pytest.mark.parametrize(("name", "said", "sent", "want"), FIELDS, ids=[f"{x[0]}={x[1]}" for x in FIELDS])
def test_each_field_is_taken_where_it_was_left_out(
    name: str, said: float, sent: float, want: float, body: Any, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    write(folder, {name: said})
    defaults = parse_options([str(folder)], {}).engine.defaults
    needed = {"prompt": "a"} if body is CompletionBody else {"messages": [{"role": "user", "content": "a"}]}

    def sampling(**options: object) -> SamplingParams:
        parsed = parse_body(json.dumps({**needed, **options}).encode(), body)
        return sampling_of(
            parsed,
            defaults=defaults,
            vocab_size=100,
            eos_token_ids=frozenset(),
            room=50,
            grammar=None,
            num_logprobs=None,
            num_prompt_logprobs=None,
            bad_words=(),
        )

    taken = max(0, said) if name == "top_k" else said
    assert getattr(sampling(), name) == getattr(sampling(**{name: None}), name) == taken
    assert getattr(sampling(**{name: sent}), name) == want


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({"temperature": 3}, "temperature=3: is outside [0, 2]"),
        ({"temperature": "hot"}, "temperature='hot': want a finite number"),
        ({"temperature": True}, "temperature=True: want a finite number"),
        ({"top_p": -1}, "top_p=-1: is outside [0, 1]"),
        ({"top_p": float("nan")}, "top_p=nan: want a finite number"),
        ({"top_k": 1.5}, "top_k=1.5: want an integer"),
        ({"top_k": -2}, "top_k=-2: is outside [-1, "),
        ({"min_p": 2}, "min_p=2: is outside [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: is outside (0, "),
        ({"max_new_tokens": 0}, "max_new_tokens=0: is outside [1, "),
    ],
    ids=str,
)
def test_a_value_of_no_use_ends_the_start_and_says_what_to_do(
    said: dict[str, Any], want: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    write(folder, said)
    with pytest.raises(ConfigError) as caught:
        parse_options([str(folder)], {})
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: {want}")
    assert str(caught.value).endswith("correct the file, or do without it by --generation-config none")
    assert parse_options([str(folder), OFF[0]], {}).engine.defaults == GenerationDefaults()
