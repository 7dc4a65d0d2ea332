"""The routes that use the model: both completion endpoints, the list of models, and the bare tokenizer."""

import uuid
from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.errors import ContextLengthError, InvalidRequestError
from headway_runtime.metrics import RejectReason
from headway_runtime.server.choice import Choice
from headway_runtime.server.generate import Generation, GenerationResponse
from headway_runtime.server.prompts import (
    Prepared,
    ServedModel,
    encode_messages,
    prepare_chat,
    prepare_completion,
)
from headway_runtime.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from headway_runtime.server.responses import ChatFormat, CompletionFormat, encode_json
from headway_runtime.server.serving import Serving, context_of, require_json


def json_response(value: object) -> Response:
    return Response(encode_json(value), media_type="application/json")


def completion_routes(serving: Serving) -> APIRouter:
    """All of them want an API key where keys were given."""
    router = APIRouter(dependencies=[Depends(serving.require_api_key)])

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(serving, request, "chatcmpl-", ChatFormat, _read_chat)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(serving, request, "cmpl-", CompletionFormat, _read_completion)

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [_model_entry(serving, name) for name in _names(serving)]}
        )

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(_model_entry(serving, serving.served_name(name)))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await _body(serving, request)
        return json_response(await serving.compute(len(raw), partial(_tokenize, serving, raw)))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        raw = await _body(serving, request)
        return json_response(await serving.compute(len(raw), partial(_detokenize, serving, raw)))

    return router


type_of_reader = Callable[[bytes, Serving, str, float], tuple[ChatBody | CompletionBody, Prepared]]


def _read_chat(raw: bytes, serving: Serving, answer_id: str, received_at: float) -> tuple[ChatBody, Prepared]:
    body = parse_body(raw, ChatBody)
    serving.served_name(body.model)
    return body, prepare_chat(body, serving.model(), answer_id, received_at)


def _read_completion(
    raw: bytes, serving: Serving, answer_id: str, received_at: float
) -> tuple[CompletionBody, Prepared]:
    body = parse_body(raw, CompletionBody)
    serving.served_name(body.model)
    return body, prepare_completion(body, serving.model(), answer_id, received_at)


async def _generate(
    serving: Serving,
    request: Request,
    id_prefix: str,
    format_of: type[ChatFormat] | type[CompletionFormat],
    read: type_of_reader,
) -> Response:
    context = context_of(request)
    serving.require_engine()
    raw = await _body(serving, request)
    answer_id = id_prefix + uuid.uuid4().hex
    try:
        body, prepared = await serving.compute(
            len(raw), partial(read, raw, serving, answer_id, context.received_at)
        )
    except ContextLengthError:
        serving.client.report_refused(RejectReason.CONTEXT_LENGTH)
        raise
    except InvalidRequestError:
        serving.client.report_refused(RejectReason.INVALID)
        raise
    model: ServedModel = serving.model()
    vocabulary = model.tokenizer.vocabulary
    context.log.streamed = bool(body.stream)
    answer = format_of(
        answer_id,
        serving.served_name(body.model),
        vocabulary,
        with_usage=body.wants_usage_chunk,
        logprobs=body.num_logprobs is not None,
    )
    choices = {
        one.request_id: Choice(index, one.request_id, vocabulary, body.stops, one.sampling.min_tokens)
        for index, one in enumerate(prepared.requests)
    }
    return GenerationResponse(
        Generation(
            client=serving.client,
            prepared=prepared,
            choices=choices,
            answer=answer,
            received_at=context.received_at,
            log=context.log,
            wants_stream=bool(body.stream),
            wants_usage_chunk=body.wants_usage_chunk,
        )
    )


async def _body(serving: Serving, request: Request) -> bytes:
    require_json(request)
    return await serving.read_body(request)


def _tokenize(serving: Serving, raw: bytes) -> dict[str, object]:
    body = parse_body(raw, TokenizeBody)
    serving.served_name(body.model)
    model = serving.model()
    if body.messages is not None:
        token_ids = encode_messages(body.messages, model, must_fit=False)
    else:
        assert body.prompt is not None
        token_ids = model.tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    return {"tokens": token_ids, "count": len(token_ids), "max_model_len": model.max_model_len}


def _detokenize(serving: Serving, raw: bytes) -> dict[str, object]:
    body = parse_body(raw, DetokenizeBody)
    serving.served_name(body.model)
    model = serving.model()
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise InvalidRequestError(
            f"tokens holds {max(body.tokens)}; this model's ids end at {model.vocab_size - 1}", param="tokens"
        )
    return {"prompt": model.tokenizer.decode(body.tokens)}


def _names(serving: Serving) -> tuple[str, ...]:
    return serving.options.served_model_names


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
