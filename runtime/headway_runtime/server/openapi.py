"""The OpenAPI document of the server, put together when it is first asked for.

Request bodies are the pydantic models that the routes read, so that the document cannot say anything else
than what is checked; fields that are known and not served stand in it with the only values they may have.
Answers are described here by hand and held to the document by tests. What the operator uses (/admin) is no
part of it.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from headway import __version__
from headway_runtime.server import answer_schemas
from headway_runtime.server.adapter_bodies import LoadAdapterBody, UnloadAdapterBody
from headway_runtime.server.body import StrictBody
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.protocol import CompletionBody
from headway_runtime.server.responses_endpoint_protocol import ResponsesBody
from headway_runtime.server.tokenize_protocol import DetokenizeBody, TokenizeBody

_SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. answer: the name of its schema. errors: statuses it may answer besides."""

    method: str
    path: str
    summary: str
    answer: str
    body: type[StrictBody] | None = None
    can_stream: bool = False
    errors: tuple[int, ...] = ()
    is_open: bool = False


_MODEL_WORK = (400, 401, 404, 408, 413, 500, 503)
_ADAPTER_WORK = (400, 401, 403, 404, 408, 413, 503)
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a chat", "ChatCompletion", ChatBody, True, _MODEL_WORK),
    Operation("post", "/v1/completions", "Continue texts", "Completion", CompletionBody, True, _MODEL_WORK),
    Operation(
        "post", "/v1/responses", "Respond to a text or items", "Response", ResponsesBody, True, _MODEL_WORK
    ),
    Operation("get", "/v1/models", "List what is served", "ModelList", errors=(401,)),
    Operation("get", "/v1/models/{name}", "Describe one model", "Model", errors=(401, 404)),
    Operation("post", "/tokenize", "Encode a text or a chat", "Tokens", TokenizeBody, errors=_MODEL_WORK),
    Operation("post", "/detokenize", "Decode token ids", "Text", DetokenizeBody, errors=_MODEL_WORK),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter",
        "Message",
        LoadAdapterBody,
        errors=_ADAPTER_WORK,
    ),
    Operation(
        "post", "/v1/unload_lora_adapter", "Unload one", "Message", UnloadAdapterBody, errors=_ADAPTER_WORK
    ),
    Operation(
        "post", "/reset_prefix_cache", "Forget what prompts have in common", "Status", errors=(401, 403, 503)
    ),
    Operation("get", "/health", "Whether the server works", "Status", errors=(503,), is_open=True),
    Operation("get", "/ping", "The same", "Status", errors=(503,), is_open=True),
    Operation("get", "/ready", "Whether it can take work", "Status", errors=(503,), is_open=True),
    Operation("get", "/version", "What it is", "Version", is_open=True),
    Operation("get", "/metrics", "Prometheus' metrics", "Metrics", errors=(503,), is_open=True),
    Operation("get", "/openapi.json", "This document", "Document", is_open=True),
)
# Said before it is known what is asked for: not HTTP, too slow or too long a head, too many connections.
_OF_EVERY_CONNECTION = (400, 408, 431, 503)
_MEANINGS: Mapping[int, str] = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    403: "Only the operator may, as others share what is to be changed",
    404: "No such model, or adapter",
    408: "The request did not arrive in time",
    413: "The body is too long",
    431: "The headers are too long or too many",
    500: "The engine failed",
    503: "Not now: starting, full, draining or without an engine; see Retry-After",
}


@functools.cache
def openapi_json() -> bytes:
    """The document."""
    return msgspec.json.encode(_document())


def _document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**_body_schemas(), **answer_schemas.ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    is_text = operation.answer in ("Metrics", "Message")
    content: dict[str, Any] = {
        "text/plain" if is_text else "application/json": {"schema": _reference(operation.answer)}
    }
    if operation.answer == "Metrics":
        content["application/openmetrics-text"] = {"schema": _reference(operation.answer)}
    if operation.can_stream:
        content["text/event-stream"] = {"schema": _reference("Events")}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    for status in sorted({*operation.errors, *_OF_EVERY_CONNECTION}):
        responses[str(status)] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": _reference("Error")}},
        }
    found: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if not operation.is_open:
        # Only where the server was given keys.
        found["security"] = [{}, {"key": []}]
    if operation.body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(operation.body.__name__)}},
        }
    if "{name}" in operation.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name]
    return found


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _SCHEMAS + name}


def _body_schemas() -> dict[str, Any]:
    """Every body and every part of one, by the name of its class."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas
