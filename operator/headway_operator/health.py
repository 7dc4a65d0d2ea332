"""Serves `/healthz` for the kubelet and `/metrics` for Prometheus, on two ports."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4"


@dataclass(frozen=True, slots=True)
class Health:
    """is_leading: holds the Lease. oldest_pass_seconds: how long the longest waiting service has waited.

    watch_lag_seconds: for how long the watch has owed a change that a list showed.
    task_failing_seconds: for how long a task beside the passes has kept ending.
    """

    is_leading: bool
    services: int
    oldest_pass_seconds: float
    limit_seconds: float
    watch_lag_seconds: float = 0.0
    task_failing_seconds: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether passes still come (who does not lead has none to take), changes are heard of, tasks run."""
        is_passing = not self.is_leading or self.oldest_pass_seconds <= self.limit_seconds
        return is_passing and max(self.watch_lag_seconds, self.task_failing_seconds) <= self.limit_seconds


@asynccontextmanager
async def serving(
    health: Callable[[], Health],
    registry: CollectorRegistry,
    *,
    host: str,
    health_port: int,
    metrics_port: int,
) -> AsyncIterator[None]:
    """Serve both while the block runs."""

    async def healthz(_: web.Request) -> web.Response:
        now = health()
        facts = asdict(now).items()
        body = {name: round(fact, 1) if isinstance(fact, float) else fact for name, fact in facts}
        return web.json_response(body, status=200 if now.is_alive else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE})

    runners = []
    try:
        for port, path, handler in ((health_port, "/healthz", healthz), (metrics_port, "/metrics", metrics)):
            application = web.Application()
            application.router.add_get(path, handler)
            runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, host, port).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()
