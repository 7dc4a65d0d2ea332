"""Which paths a gateway has, and what is said to those who ask for another, or for one in another way.

The words are a replica's (`headway_runtime/server/wrong_paths.py`), so that a client reads the same of a path
that is not there whoever answers; only what one replica does for itself alone is not among a gateway's.
"""

import difflib

from aiohttp import web

from headway_gateway import replies

# What a replica would do for itself alone -> what serves in its place.
OF_ONE_REPLICA = {
    "/v1/load_lora_adapter": "list the adapters in spec.lora.adapters, or ask each replica",
    "/v1/unload_lora_adapter": "list the adapters in spec.lora.adapters, or ask each replica",
    "/reset_prefix_cache": "ask each replica",
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
_LONGEST_SHOWN = 100


def is_proxied(path: str) -> bool:
    """Whether a decoded path belongs to the replicas' public API; a path that climbs with `..` never does."""
    if path in OF_ONE_REPLICA:
        return False
    if path.startswith("/v1/"):
        return ".." not in path.split("/")
    return path in OFFERED and path not in OWN


def no_such_path(path: str) -> web.Response:
    """404, with the path that may have been meant or all that there are."""
    likely = [one for one in OFFERED if one.removeprefix("/v1") == path.replace("/v1", "").rstrip("/")]
    near = likely or difflib.get_close_matches(path, OFFERED, 1, 0.8)
    remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(OFFERED)}"
    return replies.error_response(404, f"path={_shown(path)} is not served; {remedy}", code="unknown_url")


def no_such_method(request: web.BaseRequest, method: str) -> web.Response:
    """405, with the one method that the path has, and HEAD where that is GET."""
    return replies.error_response(
        405,
        f"method={_shown(request.method)} is not allowed for {request.path}; use {method}",
        code="method_not_supported",
        headers={"Allow": "GET, HEAD" if method == "GET" else method},
    )


def of_one_replica(path: str) -> web.Response:
    """403: of several replicas it would reach one."""
    message = f"{path} changes one replica, and a gateway has several: {OF_ONE_REPLICA[path]}"
    return replies.error_response(403, message, code="of_one_replica")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
