"""The routes of the bare tokenizer: text or messages to token ids, and back."""

from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.errors import InvalidRequestError
from headway_runtime.server.body import parse_body
from headway_runtime.server.prompts import encode_chat
from headway_runtime.server.serving import Serving, body_of, json_response
from headway_runtime.server.tokenize_protocol import DetokenizeBody, TokenizeBody


def tokenize_routes(serving: Serving) -> APIRouter:
    """They want an API key where keys were given."""
    router = APIRouter(dependencies=[Depends(serving.require_api_key)])

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await body_of(serving, request)
        return json_response(await serving.compute(len(raw), partial(_tokenize, serving, raw)))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        raw = await body_of(serving, request)
        return json_response(await serving.compute(len(raw), partial(_detokenize, serving, raw)))

    return router


def _tokenize(serving: Serving, raw: bytes) -> dict[str, object]:
    body = parse_body(raw, TokenizeBody)
    serving.served_name(body.model)
    model = serving.model()
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
    return answer


def _detokenize(serving: Serving, raw: bytes) -> dict[str, object]:
    body = parse_body(raw, DetokenizeBody)
    serving.served_name(body.model)
    model = serving.model()
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise InvalidRequestError(
            f"tokens holds token id {max(body.tokens)}; this model's ids end at {model.vocab_size - 1}; "
            "use its tokenizer",
            param="tokens",
        )
    # With the special tokens' names: it is the inverse of /tokenize.
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
