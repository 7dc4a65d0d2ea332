"""Requests by the `openai` client, with options that it has no argument for, and what they are refused by."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from openai.types import Completion

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
