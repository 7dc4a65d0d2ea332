"""The bodies of `/v1/chat/completions` and `/v1/completions`: what is accepted, and what is refused by name.

A field is here only if it works. A field of OpenAI's that is not supported yet may be sent at the value
that changes nothing (`presence_penalty: 0`); any other value, and any unknown field, is a 400 that names it.
Pydantic models check types and ranges; nothing here knows the model, its tokenizer or the engine.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway_runtime.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1

# Field -> the values that change nothing. None, "not given", is one everywhere.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
# What the openai client sends back of an assistant's message that it was given.
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}


class _Body(BaseModel):
    """Strict: no number is taken out of a string, and no field is unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        neutral = cls.neutral

        def changes_nothing(name: str, value: object) -> bool:
            # `type` keeps False from passing as 0: what is equal but of another type is a client's mistake.
            return name in neutral and (
                value is None
                or any(
                    value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral[name]
                )
            )

        return {name: value for name, value in values.items() if not changes_nothing(name, value)}


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message; `developer` is today's word for `system` and reaches the template as that."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """What chat templates read. Text parts are joined by line breaks."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class StreamOptions(_Body):
    include_usage: bool = False


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0)]


class _GenerationBody(_Body):
    """What both endpoints share."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted because they ask nothing of the model: who asks, and what the client notes for itself.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "_GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def tokens_wanted(self) -> int | None:
        """The bound on generated tokens; None: as many as fit."""
        return self.max_tokens


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(_GenerationBody):
    """POST /v1/completions. The prompt is a text, several, a list of token ids, or several of those."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def tokens_wanted(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages as the chat endpoint would see them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


AnyBody = TypeVar("AnyBody", bound=_Body)


def parse_body(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """The checked body. InvalidRequestError names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, body) from error


def _explain(error: ValidationError, body: bytes) -> InvalidRequestError:
    problems = error.errors(include_url=False, include_context=False)
    # Among the members of a union, the complaint that went deepest is about what the client meant to send.
    problem = max(problems, key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    if problem["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON ({problem['msg']}); send a JSON object")
    is_missing = problem["type"] == "missing"
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None  # what pydantic reads and Python does not: a number of thousands of digits
    param = _path_in_body(problem["loc"], value, is_missing=is_missing) or None
    shown = _shorten(problem["input"])
    if problem["type"] == "extra_forbidden":
        message = f"{param}={shown} is not supported by this server; leave the field out"
        return InvalidRequestError(message, param=param, code="unsupported_parameter")
    if is_missing:
        return InvalidRequestError(f"{param} is missing; it is required", param=param)
    if param is None:
        return InvalidRequestError(problem["msg"].removeprefix("Value error, "))
    return InvalidRequestError(f"{param}={shown}: {problem['msg']}", param=param)


def _path_in_body(location: tuple[int | str, ...], value: Any, *, is_missing: bool) -> str:
    """The path without the names of union members, which pydantic puts in and no client has sent."""
    path: list[str] = []
    for part in location:
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
            path.append(str(part))
    if is_missing:
        path.append(str(location[-1]))
    return ".".join(path)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
