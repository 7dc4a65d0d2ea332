"""Text and messages to token ids and back, as vLLM's clients ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from headway_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.runtime_server.conftest import RunningServer

USER = {"role": "user", "content": "one 日本語"}


@pytest.fixture
def root_client(fake_server: RunningServer) -> Iterator[openai.OpenAI]:
    """The client, asking beside /v1 instead of below it."""
    with openai.OpenAI(base_url=fake_server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


def ask(client: openai.OpenAI, path: str, **body: Any) -> Any:
    return client.post(path, cast_to=object, body=body)


@pytest.mark.parametrize("text", ["", "one two", "日本語 👩‍👩‍👧", "<|bos|>a<|eos|>", "added token"])
def test_tokenize_and_detokenize_are_inverse_of_each_other(root_client: openai.OpenAI, text: str) -> None:
    answer = ask(root_client, "/tokenize", prompt=text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert ask(root_client, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}


def test_messages_are_encoded_with_or_without_the_assistants_cue(
    root_client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    said = "<|bos|><|user|>one 日本語<|eos|>"
    for options, want in (
        ({}, f"{said}<|assistant|>"),
        ({"add_generation_prompt": True}, f"{said}<|assistant|>"),
        ({"add_generation_prompt": False}, said),
    ):
        assert ask(root_client, "/tokenize", messages=[USER], **options)["tokens"] == tokens(want)
    with pytest.raises(openai.BadRequestError, match="messages"):
        ask(root_client, "/tokenize", prompt="a", add_generation_prompt=False)


def test_the_vocabularys_spelling_comes_if_asked_for(root_client: openai.OpenAI) -> None:
    answer = ask(root_client, "/tokenize", prompt="o tw", return_token_strs=True)
    assert answer["token_strs"] == ["o", "Ġt", "w"]
    assert "token_strs" not in ask(root_client, "/tokenize", prompt="o tw")


def test_the_model_is_named_or_left_out(root_client: openai.OpenAI) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [40]})):
        assert ask(root_client, path, **body) == ask(root_client, path, **body, model="tiny")
        with pytest.raises(openai.NotFoundError) as caught:
            ask(root_client, path, **body, model="other")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "body", "want_param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_cannot_be_encoded_is_refused(
    root_client: openai.OpenAI, path: str, body: dict[str, Any], want_param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(root_client, path, **body)
    assert caught.value.param == want_param
