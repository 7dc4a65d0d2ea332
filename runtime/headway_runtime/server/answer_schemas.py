"""JSON schemas of what the server answers, for its OpenAPI document.

Only what a client may count on is required; members that come when asked for are optional.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_INTEGER: Schema = {"type": "integer"}
_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_BYTES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _map_of(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _refer(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _members(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def _answer(kind: str, choice: str, optional: Mapping[str, Schema] | None = None) -> Schema:
    return _members(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _list_of(_refer(choice)),
            "usage": _refer("Usage"),
        },
        optional,
    )


_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}
_PROMPT_LOGPROBS = _list_of(
    _or_null(_map_of(_members({"logprob": _NUMBER, "rank": _or_null(_INTEGER), "decoded_token": _STRING})))
)
_PROMPT: Mapping[str, Schema] = {"prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _PROMPT_LOGPROBS}
_ENDING: Mapping[str, Schema] = {
    "finish_reason": _FINISH_REASON,
    "stop_reason": _or_null({"type": ["string", "integer"]}),
}
_TOKEN: Mapping[str, Schema] = {"token": _STRING, "logprob": _NUMBER, "bytes": _BYTES}
_MODEL = _members(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "root": _STRING,
        "parent": _or_null(_STRING),
        "max_model_len": _or_null(_INTEGER),
    }
)

ANSWERS: Mapping[str, Schema] = {
    "Error": _members(
        {
            "error": _members(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": _or_null(_STRING),
                    "code": _or_null(_STRING),
                }
            )
        }
    ),
    "Usage": _members(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _members({"cached_tokens": _INTEGER}),
        },
        {"headway": _map_of(_NUMBER)},
    ),
    "Completion": _answer("text_completion", "CompletionChoice"),
    "CompletionChoice": _members(
        {
            "index": _INTEGER,
            "text": _STRING,
            "logprobs": _or_null(
                _members(
                    {
                        "tokens": _list_of(_STRING),
                        "token_logprobs": _list_of(_or_null(_NUMBER)),
                        "top_logprobs": _list_of(_or_null(_map_of(_NUMBER))),
                        "text_offset": _list_of(_INTEGER),
                    }
                )
            ),
            **_ENDING,
        },
        {"token_ids": _TOKEN_IDS, **_PROMPT},
    ),
    "ChatCompletion": _answer("chat.completion", "ChatChoice", _PROMPT),
    "ChatChoice": _members(
        {
            "index": _INTEGER,
            "message": _members(
                {
                    "role": {"const": "assistant"},
                    "content": _or_null(_STRING),
                    "refusal": _or_null(_STRING),
                },
                {"tool_calls": _list_of({"type": "object"})},
            ),
            "logprobs": _or_null(
                _members(
                    {"content": _list_of(_members({**_TOKEN, "top_logprobs": _list_of(_members(_TOKEN))}))}
                )
            ),
            **_ENDING,
        },
        {"token_ids": _TOKEN_IDS},
    ),
    "Response": _members(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _INTEGER,
            "model": _STRING,
            "status": {"enum": ["completed", "incomplete"]},
            "incomplete_details": _or_null(_members({"reason": _STRING})),
            "error": {"type": "null"},
            "output": _list_of(_members({"type": {"enum": ["message", "function_call"]}, "id": _STRING})),
            "store": {"const": False},
            "usage": _members(
                {
                    "input_tokens": _INTEGER,
                    "input_tokens_details": _members({"cached_tokens": _INTEGER}),
                    "output_tokens": _INTEGER,
                    "output_tokens_details": _members({"reasoning_tokens": _INTEGER}),
                    "total_tokens": _INTEGER,
                }
            ),
        }
    ),
    "Events": {
        "type": "string",
        "description": "Server-sent events: chunks of the answer, then [DONE]; or an error as the last one.",
    },
    "Model": _MODEL,
    "ModelList": _members({"object": {"const": "list"}, "data": _list_of(_MODEL)}),
    "Tokens": _members(
        {"tokens": _TOKEN_IDS, "count": _INTEGER, "max_model_len": _INTEGER},
        {"token_strs": _list_of(_STRING)},
    ),
    "Text": _members({"prompt": _STRING}),
    "Status": _members({"status": _STRING}),
    "Version": _members({"version": _STRING}),
    "Metrics": _STRING,
    "Message": _STRING,
    "Document": {"type": "object"},
}
