"""The gateway's own answers, in the shape that OpenAI clients read. Sends nothing."""

import json
from collections.abc import Mapping

from aiohttp import web

from headway_gateway.error_codes import GatewayCode

_SHOWN_HEADERS = "X-Request-Id, Retry-After"


def error_body(status: int, message: str, *, code: GatewayCode, param: str | None = None) -> bytes:
    """`{"error": {...}}` with the type that OpenAI's API gives to this status."""
    kind = {401: "authentication_error", 403: "permission_error"}.get(status)
    if kind is None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def error_response(
    status: int,
    message: str,
    *,
    code: GatewayCode,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error as a whole response. param: the field that is to blame, if one is."""
    return web.Response(
        status=status,
        body=error_body(status, message, code=code, param=param),
        headers={"Content-Type": "application/json", **(headers or {})},
    )


def let_pages_read(response: web.StreamResponse, request: web.BaseRequest) -> None:
    """As a replica has it without flags (CORS): pages of every origin may read the answer."""
    response.headers["Vary"] = "Origin"
    if "Origin" in request.headers:
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers["Access-Control-Expose-Headers"] = _SHOWN_HEADERS


def error_event(message: str, *, code: GatewayCode) -> bytes:
    """An error as a server-sent event, for a stream whose head is long gone."""
    return b"data: " + error_body(500, message, code=code) + b"\n\n"
