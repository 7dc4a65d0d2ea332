"""The routes of `/v1/responses`. A response is a chat in other words, and none is kept."""

from dataclasses import replace

from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.errors import InvalidRequestError
from headway_runtime.request import Request as EngineRequest
from headway_runtime.server.body import parse_body
from headway_runtime.server.call_rules import call_rules
from headway_runtime.server.chat_protocol import ChatBody
from headway_runtime.server.completions import answer_of, head_of, read_request
from headway_runtime.server.desk import Desk, without_spent
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.prompts import Arrival, Prepared, prepare_chat
from headway_runtime.server.responses_endpoint_chat import chat_of, in_own_words, origin_of
from headway_runtime.server.responses_endpoint_format import ResponsesFormat
from headway_runtime.server.responses_endpoint_protocol import ResponsesBody
from headway_runtime.server.serving import Serving
from headway_runtime.server.wrong_paths import UNOFFERED, no_such_path


def responses_routes(serving: Serving) -> APIRouter:
    """They want an API key where keys were given."""
    router = APIRouter(dependencies=[Depends(serving.require_api_key)])

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        (chat, asked), prepared = await read_request(serving, request, _read)
        rules = call_rules(chat, serving.model()) if chat.may_call else None
        answer = ResponsesFormat(head_of(serving, request, chat, "resp_"), asked, rules)
        shown = () if rules is None else rules.hidden_tags
        return answer_of(serving, request, chat, prepared, answer, shown_tags=shown)

    # No part of what is offered; they answer clients that ask all the same.
    @router.get("/v1/responses/{response_id}", include_in_schema=False)
    @router.delete("/v1/responses/{response_id}", include_in_schema=False)
    @router.post("/v1/responses/{response_id}/cancel", include_in_schema=False)
    @router.get("/v1/responses/{response_id}/input_items", include_in_schema=False)
    async def kept_response(request: Request, response_id: str) -> Response:
        if request.url.path in UNOFFERED:
            raise no_such_path(request)
        raise HttpError(
            404,
            f"response {response_id!r} is not kept: this server stores no responses; keep what you were sent",
            param="response_id",
            code="response_not_found",
        )

    return router


def _read(desk: Desk, raw: bytes, arrival: Arrival) -> tuple[tuple[ChatBody, ResponsesBody], Prepared]:
    body = parse_body(raw, ResponsesBody)
    desk.served_name(body.model)
    try:
        chat = chat_of(body)
        prepared = prepare_chat(chat, desk.model_for(body.model), arrival)
    except InvalidRequestError as error:
        raise in_own_words(error) from error
    # The answer repeats most of the body, but not the input.
    bodies = (without_spent(chat), body.model_copy(update={"input": "", **_left_out(body, desk)}))
    return bodies, replace(prepared, requests=[_in_own_words(one) for one in prepared.requests])


def _left_out(body: ResponsesBody, desk: Desk) -> dict[str, object]:
    """What the answer repeats of sampling, where it was not sent and so is the model's own."""
    defaults = desk.model().defaults
    values = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "max_output_tokens": defaults.max_new_tokens,
    }
    return {name: value for name, value in values.items() if getattr(body, name) is None}


def _in_own_words(request: EngineRequest) -> EngineRequest:
    """A request whose grammar, should it be of no use, is told from this endpoint's field."""
    grammar = request.sampling.grammar
    if grammar is None:
        return request
    parts = tuple(replace(part, param=origin_of(part.param)) for part in grammar.parts)
    named = replace(grammar, param=origin_of(grammar.param), parts=parts)
    return replace(request, sampling=replace(request.sampling, grammar=named))
