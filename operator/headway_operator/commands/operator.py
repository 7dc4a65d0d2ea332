"""`headway operator`: look after every InferenceService of a cluster, or of one namespace."""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.cluster.kubernetes_keys import load_or_create_keys
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.errors import HeadwayOperatorError
from headway_operator.handlers import watch
from headway_operator.health import Health, serving
from headway_operator.loop import ServiceLoop, ServiceLoops
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.reconcile import World
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MIN_LIVENESS_SECONDS = 120.0
MISSED_INTERVALS = 12


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT; 1 when it cannot start, with the reason on stderr."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=options.log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    if options.log_level == "info":
        logging.getLogger("kopf").setLevel("WARNING")  # it tells of every event that it passes on
    try:
        asyncio.run(run(options))
    except HeadwayOperatorError as error:
        print(f"headway operator: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    return 0


async def run(options: argparse.Namespace) -> None:
    """Run the operator until a signal comes."""
    metrics = OperatorMetrics()
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(await KubernetesApi.connect())
        keys = await load_or_create_keys(api, options.admin_secret_namespace)
        cluster = KubernetesCluster(
            api, runtime_image=options.runtime_image, gateway_image=options.gateway_image
        )
        scraper = await stack.enter_async_context(Scraper(keys, time.time))
        world = World(cluster, scraper, keys.public_pem, time.time)
        lease = Lease(api, options.admin_secret_namespace, _identity())

        def make(key: ServiceKey) -> ServiceLoop:
            return ServiceLoop(
                world,
                key,
                cluster.fetch,
                interval_seconds=options.interval_seconds,
                metrics=metrics,
                may_act=lambda: lease.is_held,
            )

        def gone(key: ServiceKey) -> None:
            cluster.forget(key)
            metrics.forget(key)

        loops = ServiceLoops(make, gone)
        await stack.enter_async_context(_running(lease))

        def health() -> Health:
            limit = max(MIN_LIVENESS_SECONDS, MISSED_INTERVALS * options.interval_seconds)
            return Health(lease.is_held, len(loops), loops.oldest_pass_seconds(), limit)

        await stack.enter_async_context(
            serving(
                health,
                metrics.registry,
                host="0.0.0.0",
                health_port=options.health_port,
                metrics_port=options.metrics_port,
            )
        )
        await watch(options.namespace, loops.wake, loops.close)


@contextlib.asynccontextmanager
async def _running(lease: Lease) -> AsyncIterator[None]:
    task = asyncio.create_task(lease.run(), name="lease")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headway operator", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--namespace", default="", help="the one namespace to look after; empty: all of them")
    add("--interval-seconds", type=_positive, default=5.0, help="time between two passes over a service")
    add("--runtime-image", required=True, help="image of the runtime pods of new revisions")
    add("--gateway-image", required=True, help="image of the gateway pods of new revisions")
    add("--health-port", type=int, default=8080, help="port of /healthz")
    add("--metrics-port", type=int, default=9090, help="port of /metrics")
    add(
        "--admin-secret-namespace",
        default=_own_namespace(),
        help="where the operator keeps its key pair and its Lease; its own namespace by default",
    )
    add("--log-level", choices=LOG_LEVELS, default="info")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _identity() -> str:
    """A pod's name is its own: a crashed container takes its Lease up again. Elsewhere, one per start."""
    hostname = socket.gethostname()
    return hostname if POD_NAMESPACE_FILE.exists() else f"{hostname}-{uuid.uuid4().hex[:8]}"


def _own_namespace() -> str:
    if POD_NAMESPACE_FILE.exists():
        return POD_NAMESPACE_FILE.read_text().strip()
    return os.environ.get("POD_NAMESPACE", "default")
