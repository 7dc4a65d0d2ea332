"""A model whose tokenizer puts a token of its own before every text, as Llama's does."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import openai
import pytest
from tokenizers import Tokenizer, processors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer, StartServer

TEXT = "one 日 two"


@pytest.fixture(scope="module")
def model_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of all tests, with such a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("prefixing") / "model"
    shutil.copytree(model_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # As Llama 3 has it; the first takes a token's space off its place in the text.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def prefixing_server(start_shared_server: StartServer) -> RunningServer:
    return start_shared_server()


@pytest.fixture(scope="module")
def client(prefixing_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{prefixing_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=TEXT, max_tokens=1, extra_body=options)


def tokenized(client: openai.OpenAI, **body: Any) -> list[int]:
    root = client.with_options(base_url=str(client.base_url).removesuffix("/v1/"))
    answer: Any = root.post("/tokenize", cast_to=object, body=body)
    found: list[int] = answer["tokens"]
    return found


def test_the_tokenizers_own_special_tokens_are_added_as_asked(client: openai.OpenAI) -> None:
    bare = tokenized(client, prompt=TEXT, add_special_tokens=False)
    assert 0 not in bare
    assert tokenized(client, prompt=TEXT) == [0, *bare]
    for options, want in (
        ({}, [0, *bare]),
        ({"add_special_tokens": True}, [0, *bare]),
        ({"add_special_tokens": False}, bare),
    ):
        answer = complete(client, return_token_ids=True, **options)
        assert answer.choices[0].prompt_token_ids == want
    messages: Any = [{"role": "user", "content": TEXT}]
    templated = tokenized(client, messages=messages)
    assert templated[0] == 0, "the template's own"
    assert templated[1] != 0
    assert tokenized(client, messages=messages, add_special_tokens=True) == [0, *templated]
    for options, want in (({}, templated), ({"add_special_tokens": True}, [0, *templated])):
        chat: Any = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=1,
            extra_body={"return_token_ids": True, **options},
        )
        assert chat.prompt_token_ids == want
        response = client.responses.create(model="tiny", input=TEXT, max_output_tokens=1, extra_body=options)
        assert response.usage is not None
        assert response.usage.input_tokens == len(want)


def test_an_echo_leaves_out_what_the_tokenizer_has_put_before_the_text(client: openai.OpenAI) -> None:
    choice = complete(client, echo=True, logprobs=0).choices[0]
    assert choice.text == TEXT, "the answer begins with <|bos|>, which is no text"
    logprobs = choice.logprobs
    assert logprobs.tokens[0] == logprobs.tokens[-1] == "<|bos|>"
    assert (logprobs.text_offset[:3], logprobs.text_offset[-1]) == ([0, 0, 1], len(TEXT))
    assert logprobs.tokens[1:4] == ["o", "n", "e"]
    assert logprobs.tokens[-4:-1] == [" t", "w", "o"]
    assert logprobs.text_offset[-4:-1] == [5, 7, 8]
    spelled = complete(client, echo=True, skip_special_tokens=False).choices[0]
    assert spelled.text == f"{TEXT}<|bos|>"
