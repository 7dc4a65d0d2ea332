"""The routes that use the model: both completion endpoints and the list of models."""

import uuid
from collections.abc import Callable, Collection
from typing import TypeVar

from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.adapters.adapter import AdapterEntry
from headway_runtime.errors import InvalidRequestError
from headway_runtime.metrics import RejectReason
from headway_runtime.server.body import parse_body
from headway_runtime.server.call_rules import call_rules
from headway_runtime.server.chat_format import ChatFormat
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.chat_tools_format import ToolChatFormat
from headway_runtime.server.choices import choices_of
from headway_runtime.server.desk import Desk, without_spent
from headway_runtime.server.generate import Generation, GenerationResponse
from headway_runtime.server.prompts import Arrival, Prepared, prepare_chat, prepare_completion
from headway_runtime.server.protocol import CompletionBody, GenerationBody
from headway_runtime.server.responses import AnswerFormat, AnswerHead, CompletionFormat
from headway_runtime.server.serving import Serving, body_of, context_of, json_response, tenant_of
from headway_runtime.server.tracing import NOTES_KEY, notes_of
from headway_runtime.server.wrong_paths import no_such_path

Body = TypeVar("Body")


def completion_routes(serving: Serving) -> APIRouter:
    """All of them want an API key where keys were given."""
    router = APIRouter(dependencies=[Depends(serving.require_api_key)])

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, prepared = await read_request(serving, request, _read_chat)
        head = head_of(serving, request, body, "chatcmpl-")
        if not body.may_call:
            return answer_of(serving, request, body, prepared, ChatFormat(head))
        rules = call_rules(body, serving.model())
        return answer_of(
            serving, request, body, prepared, ToolChatFormat(head, rules), shown_tags=rules.hidden_tags
        )

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, prepared = await read_request(serving, request, _read_completion)
        answer = CompletionFormat(head_of(serving, request, body, "cmpl-"))
        return answer_of(serving, request, body, prepared, answer)

    @router.get("/v1/models")
    async def models() -> Response:
        await serving.hear_of_adapters()
        served = [_model_entry(serving, name) for name in serving.options.served_model_names]
        adapters = [_adapter_entry(serving, one) for one in serving.client.adapters]
        return json_response({"object": "list", "data": served + adapters})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if not name:
            raise no_such_path(request)  # the list's path with a slash too many
        await serving.hear_of_adapters()
        for one in serving.client.adapters:
            if one.name == name:
                return json_response(_adapter_entry(serving, one))
        return json_response(_model_entry(serving, serving.served_name(name)))

    return router


async def read_request(
    serving: Serving, request: Request, read: Callable[[Desk, bytes, Arrival], tuple[Body, Prepared]]
) -> tuple[Body, Prepared]:
    """What `read` makes of a request's body; one that it refuses is counted."""
    serving.require_engine()
    raw = await body_of(serving, request)
    context = context_of(request)
    arrival = Arrival(uuid.uuid4().hex, context.received_at, tenant_of(request))
    try:
        return await serving.read(read, raw, arrival)
    except InvalidRequestError as error:
        is_too_long = error.code == "context_length_exceeded"
        serving.client.report_refused(RejectReason.CONTEXT_LENGTH if is_too_long else RejectReason.INVALID)
        raise


def answer_of(
    serving: Serving,
    request: Request,
    body: GenerationBody,
    prepared: Prepared,
    answer: AnswerFormat,
    *,
    shown_tags: Collection[str] = (),
) -> Response:
    """The response that runs a prepared request. shown_tags: special tokens whose names `answer` reads."""
    context = context_of(request)
    context.log.streamed = bool(body.stream)
    if serving.tracer is not None:
        request.scope[NOTES_KEY] = notes_of(body, serving.served_name(body.model))
    return GenerationResponse(
        Generation(
            client=serving.client,
            prepared=prepared,
            choices=choices_of(body, prepared, serving.model().tokenizer.vocabulary, shown_tags),
            answer=answer,
            received_at=context.received_at,
            log=context.log,
            wants_stream=bool(body.stream),
            wants_usage_chunk=body.wants_usage_chunk,
            wants_timings=bool(body.return_timings),
        )
    )


def head_of(serving: Serving, request: Request, body: GenerationBody, id_prefix: str) -> AnswerHead:
    """What all chunks of an answer share; its id ends with the request's, so that the access log has it."""
    context = context_of(request)
    named_in_body = None if context.is_named else body.request_id
    return AnswerHead(
        answer_id=id_prefix + (named_in_body or context.request_id),
        model=serving.served_name(body.model),
        vocabulary=serving.model().tokenizer.vocabulary,
        with_usage=body.wants_usage_chunk,
        logprobs=body.num_logprobs is not None,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


def _read_chat(desk: Desk, raw: bytes, arrival: Arrival) -> tuple[ChatBody, Prepared]:
    body = parse_body(raw, ChatBody)
    desk.served_name(body.model)
    prepared = prepare_chat(body, desk.model_for(body.model), arrival)
    return without_spent(body), prepared


def _read_completion(desk: Desk, raw: bytes, arrival: Arrival) -> tuple[CompletionBody, Prepared]:
    body = parse_body(raw, CompletionBody)
    desk.served_name(body.model)
    prepared = prepare_completion(body, desk.model_for(body.model), arrival)
    return without_spent(body), prepared


def _model_entry(serving: Serving, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started_at_unix,
        "owned_by": "headway",
        "root": serving.options.model,
        "parent": None,
        "max_model_len": serving.options.engine.max_model_len,
    }


def _adapter_entry(serving: Serving, adapter: AdapterEntry) -> dict[str, object]:
    own = {
        "id": adapter.name,
        "created": adapter.loaded_at,
        "root": adapter.source,
        "parent": adapter.parent or serving.options.served_model_names[0],
    }
    return _model_entry(serving, adapter.name) | own
