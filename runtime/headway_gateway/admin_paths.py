"""The paths below `/admin/`, which the operator alone may call.

    GET /admin/sample     what the controller goes by
    PUT /admin/routing    revisions, their shares, and who may wait; told whole
    GET /admin/demand     answered once a request waits for a replica, or after ?timeout_seconds (a long poll)

Whether a call may be made at all is decided in `admin.py`, what a routing means in `pool.py`.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable

from aiohttp import web

from headway_gateway import replies
from headway_gateway.admin import AdminKeys, sample
from headway_gateway.body import read_body
from headway_gateway.counters import Counters
from headway_gateway.errors import BodyError, RoutingError, TokenError
from headway_gateway.paths import no_such_method
from headway_gateway.pool import BackendPool
from headway_gateway.routing import Routing, parse_routing

LONGEST_DEMAND_SECONDS = 30.0
MOST_ROUTING_BYTES = 16_384
ROUTING_TIMEOUT_SECONDS = 5.0
METHODS = {"/admin/sample": "GET", "/admin/routing": "PUT", "/admin/demand": "GET"}


class AdminPaths:
    """Answers admin calls. `on_routing` hears of each routing that is followed from now on."""

    def __init__(
        self,
        keys: AdminKeys | None,
        counters: Counters,
        pool: BackendPool,
        *,
        instance: str,
        on_routing: Callable[[Routing], None],
    ) -> None:
        """keys: None answers every call 403."""
        self._keys = keys
        self._counters = counters
        self._pool = pool
        self._instance = instance
        self._on_routing = on_routing
        self._started_at = asyncio.get_running_loop().time()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer a call of one of METHODS' paths."""
        method = METHODS[request.path]
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            return no_such_method(request, method)
        if self._keys is None:
            return replies.error_response(
                403,
                "the admin API is off; start the gateway with --admin-public-key-file and --admin-audience",
                code="admin_disabled",
            )
        try:
            self._keys.verify(request.headers.get("Authorization"))
        except TokenError as error:
            return replies.error_response(
                401, str(error), code="invalid_admin_token", headers={"WWW-Authenticate": "Bearer"}
            )
        if request.path == "/admin/routing":
            return await self._route(request)
        if request.path == "/admin/demand":
            return await self._await_demand(request)
        uptime = asyncio.get_running_loop().time() - self._started_at
        return _json(sample(self._counters, self._pool, instance=self._instance, uptime_seconds=uptime))

    async def _route(self, request: web.BaseRequest) -> web.Response:
        try:
            body = await read_body(
                request, max_bytes=MOST_ROUTING_BYTES, timeout_seconds=ROUTING_TIMEOUT_SECONDS
            )
            routing = parse_routing(body or b"")
        except BodyError as error:
            return replies.error_response(error.status, str(error), code=error.code)
        except RoutingError as error:
            return replies.error_response(422, str(error), code="invalid_routing")
        self._pool.route(routing)
        self._on_routing(routing)
        return _json(routing.to_dict())

    async def _await_demand(self, request: web.BaseRequest) -> web.Response:
        text = request.rel_url.query.get("timeout_seconds", str(LONGEST_DEMAND_SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= LONGEST_DEMAND_SECONDS:
            return replies.error_response(
                422,
                f"timeout_seconds={text!r} is outside [0, {LONGEST_DEMAND_SECONDS:g}]; choose a value inside "
                "that range",
                code="out_of_range",
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pool.demand()
        return _json({"waiting": self._pool.num_waiting})


def _json(value: dict[str, object]) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), headers={"Content-Type": "application/json"})
