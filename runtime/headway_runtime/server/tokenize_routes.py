"""The routes of the bare tokenizer: text or messages to token ids, and back."""

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import parse_body
from headway_runtime.server.desk import Desk
from headway_runtime.server.long_answers import JsonBytes
from headway_runtime.server.prompts import encode_chat
from headway_runtime.server.serving import Serving, body_of
from headway_runtime.server.tokenize_protocol import DetokenizeBody, TokenizeBody


def tokenize_routes(serving: Serving) -> APIRouter:
    """They want an API key where keys were given."""
    router = APIRouter(dependencies=[Depends(serving.require_api_key)])

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await body_of(serving, request)
        return JsonBytes(await serving.read(_tokenize, raw))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        raw = await body_of(serving, request)
        return JsonBytes(await serving.read(_detokenize, raw))

    return router


def _tokenize(desk: Desk, raw: bytes) -> bytes:
    body = parse_body(raw, TokenizeBody)
    desk.served_name(body.model)
    model = desk.model()
    if body.messages is not None:
        token_ids = encode_chat(body, model, longest=None, add_special_tokens=body.add_special_tokens is True)
    else:
        assert body.prompt is not None
        token_ids = model.tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    answer: dict[str, object] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_string(token_id) for token_id in token_ids]
    return msgspec.json.encode(answer)


def _detokenize(desk: Desk, raw: bytes) -> bytes:
    body = parse_body(raw, DetokenizeBody)
    desk.served_name(body.model)
    model = desk.model()
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise InvalidRequestError(
            f"tokens holds token id {max(body.tokens)}; this model's ids end at {model.vocab_size - 1}; "
            "use its tokenizer",
            param="tokens",
        )
    # With the special tokens' names: it is the inverse of /tokenize.
    return msgspec.json.encode({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})
