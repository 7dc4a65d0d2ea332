"""Which path does what: the OpenAI API goes to a replica, the gateway's own paths are answered here."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from headway_gateway import connections, replies
from headway_gateway.admin import AdminKeys
from headway_gateway.admin_paths import METHODS as ADMIN_METHODS
from headway_gateway.admin_paths import AdminPaths
from headway_gateway.config import GatewayConfig
from headway_gateway.connections import Connections
from headway_gateway.counters import Counters
from headway_gateway.headers import REQUEST_ID, request_id_of
from headway_gateway.held_bodies import BodyBudget, limit_of
from headway_gateway.last_answers import LastAnswers
from headway_gateway.memory_limit import container_memory_bytes
from headway_gateway.metrics import CONTENT_TYPE, Metrics, StateCollector
from headway_gateway.paths import OF_ONE_REPLICA, is_proxied, no_such_method, no_such_path, of_one_replica
from headway_gateway.pool import BackendPool
from headway_gateway.proxy import Proxy
from headway_gateway.routing import Routing
from headway_gateway.upstream import Upstream, can_connect
from headway_gateway.without_replica import answer_without_replica

log = logging.getLogger(__name__)


class Application:
    """One gateway: its pool, its counts and its handler of requests. Make it inside the running loop."""

    def __init__(
        self,
        config: GatewayConfig,
        version: str,
        upstream: Upstream | None = None,
        *,
        open_files: int | None = None,
    ) -> None:
        """open_files: how many there may be; None for any number.

        Raises ConfigError when the admin keys cannot be read.
        """
        self._version = version
        self._instance = uuid.uuid4().hex
        keys: AdminKeys | None = None
        if config.admin_public_key_file is not None:
            keys = AdminKeys(config.admin_public_key_file, config.admin_audience or "")
        self.counters = Counters()
        self._upstream = upstream or Upstream(config.idle_timeout_seconds)
        self.pool = BackendPool(
            config.max_waiting,
            config.waiting_timeout_seconds,
            max_waiting_bytes=config.max_waiting_bytes,
            can_connect=can_connect,
        )
        memory = container_memory_bytes()
        self.bodies = BodyBudget(config.max_held_bytes or limit_of(memory))
        self.connections = Connections(connections.limit_of(config.max_connections, memory, open_files))
        self._metrics = Metrics(
            StateCollector(
                self.counters,
                self.pool,
                self.bodies,
                self.connections,
                version=version,
                instance=self._instance,
            )
        )
        self._last_answers = LastAnswers()
        self._revisions: tuple[str, ...] = ()
        latencies = self._metrics.latencies
        self.proxy = Proxy(
            config, self.pool, self._upstream, self.counters, latencies, self.bodies, self._last_answers
        )
        self._admin = AdminPaths(
            keys, self.counters, self.pool, instance=self._instance, on_routing=self._note_routing
        )
        self._own_paths: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/health": self._health,
            "/ping": self._health,
            "/ready": self._ready,
            "/version": self._tell_version,
            "/metrics": self._tell_metrics,
        }

    async def close(self) -> None:
        """Close the connections to replicas."""
        self.pool.close()
        await self._upstream.close()

    def _note_routing(self, routing: Routing) -> None:
        """Numbers by revision are kept for those there are, and answers while these are the same."""
        if routing.revisions != self._revisions:
            self._revisions = routing.revisions
            self._last_answers.forget()
        self.counters.keep_revisions(routing.revisions)
        self._metrics.latencies.keep_revisions(routing.revisions)

    def note_backend_list_error(self) -> None:
        """A list of backends could not be had; the pool keeps the last."""
        self.counters.backend_list_errors += 1

    def note_backend_list_seen(self) -> None:
        """The list of backends that the pool has is the current one."""
        self.counters.backend_list_seen_at = time.monotonic()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        path = request.path
        has_place = self.connections.has_place(request.protocol, asyncio.get_running_loop().time())
        if is_proxied(path):
            known = self._known(request) if has_place else self._no_place(request)
            if known is None:
                return await self.proxy.handle(request)
            response = known
        elif path in OF_ONE_REPLICA:
            response = of_one_replica(path)
        elif path in ADMIN_METHODS:
            response = await self._admin.handle(request)
        elif (own := self._own_paths.get(path)) is None:
            response = no_such_path(path)
        elif request.method not in ("GET", "HEAD"):
            response = no_such_method(request, "GET")
        else:
            response = own(request)
        response.headers[REQUEST_ID] = request_id_of(request.headers)
        if self.proxy.is_draining or not has_place:
            response.force_close()
        return response

    def _no_place(self, request: web.BaseRequest) -> web.Response:
        self.connections.num_refused += 1
        most = self.connections.limit
        log.warning("answered 503 (connections): %d are open", most, extra={"path": request.path})
        response = replies.error_response(
            503,
            f"{most} connections are open; retry in a second",
            code="connections",
            headers={"Retry-After": "1"},
        )
        replies.let_pages_read(response, request)
        return response

    def _known(self, request: web.BaseRequest) -> web.Response | None:
        """What is answered without a replica while none is ready; a suspended service refuses all alike."""
        if self.pool.num_ready or self.pool.routing.is_suspended:
            return None
        return answer_without_replica(request, self._last_answers)

    def _health(self, request: web.BaseRequest) -> web.Response:
        return _json({"status": "ok"})

    def _ready(self, request: web.BaseRequest) -> web.Response:
        if self.proxy.is_draining:
            return _json({"status": "draining"}, status=503)
        if not self.pool.has_list:
            return _json({"status": "no list of backends has come yet"}, status=503)
        # Without a replica, too: requests wait here until there is one, and are what wakes a service.
        return _json({"status": "ready", "backends_ready": self.pool.num_ready})

    def _tell_version(self, request: web.BaseRequest) -> web.Response:
        return _json({"version": self._version, "component": "gateway"})

    def _tell_metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})


def _json(value: dict[str, object], *, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(value).encode(), headers={"Content-Type": "application/json"}
    )
