"""Which path does what: the OpenAI API goes to a replica, the gateway's own paths are answered here."""

import asyncio
import json
import uuid
from collections.abc import Callable

from aiohttp import web

from headway_gateway import replies
from headway_gateway.admin import AdminKeys, sample
from headway_gateway.config import GatewayConfig
from headway_gateway.counters import Counters
from headway_gateway.errors import TokenError
from headway_gateway.headers import REQUEST_ID, request_id_of
from headway_gateway.metrics import CONTENT_TYPE, Metrics
from headway_gateway.pool import BackendPool
from headway_gateway.proxy import Proxy
from headway_gateway.upstream import Upstream

# What a replica would do for itself alone.
OF_ONE_REPLICA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Application:
    """One gateway: its pool, its counts and its handler of requests. Make it inside the running loop."""

    def __init__(self, config: GatewayConfig, version: str, upstream: Upstream | None = None) -> None:
        """Raises ConfigError when the admin keys cannot be read."""
        self._version = version
        self._instance = uuid.uuid4().hex
        self._started_at = asyncio.get_running_loop().time()
        self._admin_keys: AdminKeys | None = None
        if config.admin_public_key_file is not None:
            self._admin_keys = AdminKeys(config.admin_public_key_file, config.admin_audience or "")
        self.counters = Counters()
        self.pool = BackendPool(config.max_waiting)
        self._metrics = Metrics(self.counters, self.pool, version=version, instance=self._instance)
        self._upstream = upstream or Upstream(config.idle_timeout_seconds)
        self.proxy = Proxy(config, self.pool, self._upstream, self.counters, self._metrics.latencies)
        self._own_paths: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._tell_version,
            "/metrics": self._tell_metrics,
            "/admin/sample": self._admin_sample,
        }

    async def close(self) -> None:
        """Close the connections to replicas."""
        await self._upstream.close()

    def note_backend_list_error(self) -> None:
        """A list of backends could not be had; the pool keeps the last."""
        self.counters.backend_list_errors += 1

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        path = request.path
        if is_proxied(path):
            return await self.proxy.handle(request)
        own = self._own_paths.get(path)
        if path in OF_ONE_REPLICA:
            response = replies.error_response(
                403,
                f"{path} changes one replica, and a gateway has several: list the adapters in "
                "spec.lora.adapters, or ask each replica",
                code="of_one_replica",
            )
        elif own is None:
            response = replies.error_response(404, f"path {path!r} does not exist", code="not_found")
        elif request.method not in ("GET", "HEAD"):
            response = replies.error_response(
                405,
                f"{request.method} {path} is not possible; use GET",
                code="method",
                headers={"Allow": "GET, HEAD"},
            )
        else:
            response = own(request)
        response.headers[REQUEST_ID] = request_id_of(request.headers)
        if self.proxy.is_draining:
            response.force_close()
        return response

    def _health(self, request: web.BaseRequest) -> web.Response:
        return _json({"status": "ok"})

    def _ready(self, request: web.BaseRequest) -> web.Response:
        if self.proxy.is_draining:
            return _json({"status": "draining"}, status=503)
        num_ready = self.pool.num_ready
        if num_ready == 0:
            return _json({"status": "no backend is ready", "backends": len(self.pool.backends)}, status=503)
        return _json({"status": "ready", "backends_ready": num_ready})

    def _tell_version(self, request: web.BaseRequest) -> web.Response:
        return _json({"version": self._version, "component": "gateway"})

    def _tell_metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    def _admin_sample(self, request: web.BaseRequest) -> web.Response:
        if self._admin_keys is None:
            return replies.error_response(
                403,
                "the admin API is off; start the gateway with --admin-public-key-file and --admin-audience",
                code="admin_disabled",
            )
        try:
            self._admin_keys.verify(request.headers.get("Authorization"))
        except TokenError as error:
            return replies.error_response(
                401, str(error), code="invalid_token", headers={"WWW-Authenticate": "Bearer"}
            )
        uptime = asyncio.get_running_loop().time() - self._started_at
        return _json(sample(self.counters, self.pool, instance=self._instance, uptime_seconds=uptime))


def is_proxied(path: str) -> bool:
    """Whether a decoded path belongs to the replicas' public API; a path that climbs with `..` never does."""
    if path in OF_ONE_REPLICA:
        return False
    if path.startswith("/v1/"):
        return ".." not in path.split("/")
    return path in ("/tokenize", "/detokenize", "/openapi.json")


def _json(value: dict[str, object], *, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(value).encode(), headers={"Content-Type": "application/json"}
    )
