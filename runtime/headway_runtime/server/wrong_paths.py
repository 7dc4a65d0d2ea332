"""What is said to those who ask for a path that there is not, or for one in a way that it does not know.

Knows the paths that the OpenAPI document names, and asks the application's own routes for their methods.
"""

import difflib
from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute, Match

from headway_runtime.sampling_params import shown
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.openapi import OPERATIONS

# Paths of OpenAI's that look like a response's own, and what serves in their place.
UNOFFERED = {
    "/v1/responses/input_tokens": "POST /tokenize counts the tokens of a text or of messages",
    "/v1/responses/compact": "send fewer items; POST /tokenize counts the tokens of a text or of messages",
}
# What a gateway has not, since it would reach one of several replicas. Its name for it: of_one_replica.
OF_ONE_REPLICA = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"))
_SET_BY_A_GATEWAY = "X-Headway-Waited-Milliseconds"
_METHODS = ("GET", "POST", "PATCH", "DELETE")


def no_such_path(request: Request) -> HttpError:
    """404, with the path that may have been meant or all that there are."""
    path = request.url.path
    instead = UNOFFERED.get(path.rstrip("/"))
    if instead is not None:
        return HttpError(404, f"path={shown(path)} is not served; {instead}", code="unknown_url")
    behind_a_gateway = _SET_BY_A_GATEWAY in request.headers
    offered = offered_paths(behind_a_gateway=behind_a_gateway)
    # A base URL with or without /v1 is the mistake most often made.
    likely = [one for one in offered if one.removeprefix("/v1") == path.replace("/v1", "").rstrip("/")]
    near = likely or difflib.get_close_matches(path, offered, 1, 0.8)
    remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(offered)}"
    return HttpError(404, f"path={shown(path)} is not served; {remedy}", code="unknown_url")


def offered_paths(*, behind_a_gateway: bool) -> list[str]:
    """What a client can ask for, which may see this server or a gateway before it."""
    paths = dict.fromkeys(operation.path for operation in OPERATIONS)
    return [path for path in paths if not (behind_a_gateway and path in OF_ONE_REPLICA)]


def no_such_method(request: Request, routes: Sequence[BaseRoute]) -> HttpError:
    """405, with the methods that the path has."""
    allowed = [one for one in _METHODS if any(_takes(route, request, one) for route in routes)]
    return HttpError(
        405,
        f"method={shown(request.method)} is not allowed for {request.url.path}; use {' or '.join(allowed)}",
        code="method_not_supported",
        headers={"Allow": ", ".join([*allowed, "HEAD"] if "GET" in allowed else allowed)},
    )


def _takes(route: BaseRoute, request: Request, method: str) -> bool:
    return route.matches({**request.scope, "method": method})[0] is Match.FULL
