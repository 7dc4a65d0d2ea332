"""Which paths a gateway has, and what is said to those who ask for another, or for one in another way.

The words are a replica's (`headway_runtime/server/wrong_paths.py`), so that a client reads the same of a path
that is not there whoever answers; only what one replica does for itself alone is not among a gateway's.
"""

import difflib
import re
from collections.abc import Sequence

from aiohttp import web

from headway_gateway import replies

# What a replica would do for itself alone -> what serves in its place.
OF_ONE_REPLICA = {
    "/v1/load_lora_adapter": "list the adapters in spec.lora.adapters, or ask each replica",
    "/v1/unload_lora_adapter": "list the adapters in spec.lora.adapters, or ask each replica",
    "/reset_prefix_cache": "ask each replica",
}
# Paths of OpenAI's that look like a response's own, and what serves in their place.
UNOFFERED = {
    "/v1/responses/input_tokens": "POST /tokenize counts the tokens of a text or of messages",
    "/v1/responses/compact": "send fewer items; POST /tokenize counts the tokens of a text or of messages",
}
OWN = ("/health", "/ping", "/ready", "/version", "/metrics")
OFFERED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/models",
    "/v1/models/{name}",
    "/tokenize",
    "/detokenize",
    *OWN,
    "/openapi.json",
)
_METHODS = {
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    "/v1/responses": ("POST",),
    "/v1/models": ("GET",),
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/openapi.json": ("GET",),
}
# Of responses, which nobody keeps: no part of what is offered, and answered all the same.
_KEPT_RESPONSE = re.compile(r"/v1/responses/([^/]+)(/cancel|/input_items|)")
_METHODS_OF_RESPONSES = {"": ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}
_LONGEST_SHOWN = 100


def is_proxied(path: str) -> bool:
    """Whether a decoded path belongs to the replicas' public API; a path that climbs with `..` never does."""
    if path in OF_ONE_REPLICA:
        return False
    if path.startswith("/v1/"):
        return ".." not in path.split("/")
    return path in OFFERED and path not in OWN


def methods_of(path: str) -> Sequence[str]:
    """The methods that a replica has for one of its paths, but for HEAD, which goes with GET; none for a path
    that it has not."""
    if path in UNOFFERED:
        return ()
    if path.startswith("/v1/models/") and path != "/v1/models/":
        return ("GET",)
    response = _KEPT_RESPONSE.fullmatch(path)
    return _METHODS.get(path, ()) if response is None else _METHODS_OF_RESPONSES[response[2]]


def kept_response_of(path: str) -> str | None:
    """The response that a path is of."""
    response = _KEPT_RESPONSE.fullmatch(path)
    return None if response is None else response[1]


def no_such_response(response_id: str) -> web.Response:
    """404: none is kept."""
    return replies.error_response(
        404,
        f"response {response_id!r} is not kept: this server stores no responses; keep what you were sent",
        param="response_id",
        code="response_not_found",
    )


def no_such_model(name: str, names: Sequence[str]) -> web.Response:
    """404, with the names that there are."""
    return replies.error_response(
        404,
        f"model={_shown(name)} is not served here; use {' or '.join(map(repr, names))}",
        param="model",
        code="model_not_found",
    )


def no_such_path(path: str) -> web.Response:
    """404, with the path that may have been meant or all that there are."""
    if (instead := UNOFFERED.get(path.rstrip("/"))) is not None:
        return replies.error_response(
            404, f"path={_shown(path)} is not served; {instead}", code="unknown_url"
        )
    likely = [one for one in OFFERED if one.removeprefix("/v1") == path.replace("/v1", "").rstrip("/")]
    near = likely or difflib.get_close_matches(path, OFFERED, 1, 0.8)
    remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(OFFERED)}"
    return replies.error_response(404, f"path={_shown(path)} is not served; {remedy}", code="unknown_url")


def no_such_method(request: web.BaseRequest, *methods: str) -> web.Response:
    """405, with the methods that the path has, and HEAD where GET is one."""
    return replies.error_response(
        405,
        f"method={_shown(request.method)} is not allowed for {request.path}; use {' or '.join(methods)}",
        code="method_not_supported",
        headers={"Allow": ", ".join([*methods, "HEAD"] if "GET" in methods else methods)},
    )


def of_one_replica(path: str) -> web.Response:
    """403: of several replicas it would reach one."""
    message = f"{path} changes one replica, and a gateway has several: {OF_ONE_REPLICA[path]}"
    return replies.error_response(403, message, code="of_one_replica")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
