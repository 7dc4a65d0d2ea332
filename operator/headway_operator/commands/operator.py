"""`headway operator`: look after InferenceServices and ModelCaches of a cluster, or of some namespaces."""

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import re
import socket
import sys
import time
import uuid
from pathlib import Path

from headway.argument_types import integer, positive
from headway.command_parser import CommandParser
from headway.event_loop import loop_factory
from headway_operator.background import Background
from headway_operator.cache_metrics import CacheMetrics
from headway_operator.cache_pass import take_cache_pass
from headway_operator.cluster.kubernetes import CACHED_KINDS, KubernetesCluster
from headway_operator.cluster.kubernetes_account import owners
from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_cache import KubernetesCache, is_news
from headway_operator.cluster.kubernetes_keys import follow_keys, load_or_create_keys
from headway_operator.cluster.kubernetes_lease import Lease
from headway_operator.cluster.kubernetes_model_caches import KubernetesModelCaches
from headway_operator.errors import HeadwayOperatorError
from headway_operator.garbage import collect_now_and_then, hold_on
from headway_operator.handlers import watch
from headway_operator.health import Health, serving
from headway_operator.keys import KeyRing
from headway_operator.loop import Fetch, ServiceLoop, ServiceLoops
from headway_operator.manifests.pod import every_address
from headway_operator.model_cache import is_other_offer
from headway_operator.model_cache.offer import uses
from headway_operator.names import CACHE_KIND, KIND, CacheKey
from headway_operator.operator_log import configure
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import World
from headway_operator.resync import Resync, Version
from headway_operator.scrape import Scraper
from headway_operator.spec.scheduling import LABEL_KEY_PATTERN, LABEL_VALUE_PATTERN
from headway_operator.state import Manifest, ServiceKey
from headway_operator.turns import Turns

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
RUNBOOK_PATTERN = r"(https?://[^\s#\"<>{}]+)?"
POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MIN_LIVENESS_SECONDS = 120.0
MISSED_INTERVALS = 12
# Passes wait for the API server most of the time; more at once would only wait for this process instead.
WOKEN_PASSES = 16
CLOCKED_PASSES = 32
# Passes that begin before the cache is filled ask the API server for each thing; after this time they do.
CACHE_SECONDS = 20.0


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT; 1 when it cannot start, with the reason on stderr."""
    options = _parser().parse_args(argv)
    configure(options.log_level, options.log_format)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(options))
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
        api = await stack.enter_async_context(await KubernetesApi.connect(on_call=metrics.called))
        secrets = options.admin_secret_namespace
        own = owners() if secrets == _pod_namespace() else []
        keys = KeyRing(await load_or_create_keys(api, secrets, own), time.monotonic)
        # The Lease is renewed over connections of its own: however many calls wait, leadership does not.
        lease_api = await stack.enter_async_context(await KubernetesApi.connect(on_call=metrics.called))
        lease = Lease(lease_api, secrets, _identity(), owners=own)
        # Everything that is written for services goes through this view, or the scraper: the Lease gates
        # both.
        guarded = api.guarded(lambda: lease.is_held)
        namespaces = tuple(dict.fromkeys(filter(None, options.namespace)))
        cache = KubernetesCache(api, namespaces, CACHED_KINDS, lambda *change: changed(*change))
        cluster = KubernetesCluster(
            guarded,
            runtime_image=options.runtime_image,
            gateway_image=options.gateway_image,
            operator_namespace=_pod_namespace(),
            lease_namespace=secrets,
            monitoring_namespace=options.monitoring_namespace,
            monitoring_labels=options.monitoring_label,
            runbook_url=options.runbook_url,
            image_pull_secrets=options.image_pull_secret,
            allows_unrestricted=options.allow_unrestricted_templates,
            is_ipv6=_is_ipv6(),
            cache=cache,
        )
        scraper = await stack.enter_async_context(Scraper(keys, time.time, may_write=lambda: lease.is_held))
        turns = Turns(WOKEN_PASSES, CLOCKED_PASSES)
        world = World(
            cluster, scraper, keys, time.time, lambda: len(loops), turns.pace, options.interval_seconds
        )

        async def fetch(key: ServiceKey) -> Manifest | None:
            return await cluster.fetch(key, from_memory=not resync.owes(key))

        loops = _loops(world, cluster, fetch, lease, metrics, turns, options.interval_seconds)
        cache_loops = _cache_loops(world, cluster, cache, guarded, lease, metrics, options.interval_seconds)
        metrics.watch(lambda: lease.is_held, lambda: len(loops))

        is_watching = False

        def changed(kind: str, key: ServiceKey, old: Json | None, new: Json) -> None:
            # Before that, the first list of services is still to come, and brings all of them.
            if not is_watching:
                return
            if kind == CACHE_KIND and is_other_offer(old, new):
                for user in _users(cache, key):
                    loops.wake(user)
            known = cache_loops if isinstance(key, CacheKey) else loops
            if is_news(kind, old, new) and (kind in (KIND, CACHE_KIND) or key in known):
                known.wake(key)

        seen: dict[ServiceKey, Version] = {}

        async def listed() -> tuple[Json, ...]:
            lists = [await api.list_metadata(KIND, namespace) for namespace in namespaces or ("",)]
            return tuple(itertools.chain.from_iterable(lists))

        resync = Resync(listed, seen, loops.wake, metrics.missed)
        background = Background(metrics.restarted)
        follow = functools.partial(follow_keys, api, secrets, keys, own)
        await stack.enter_async_context(background.running(lease.run, "lease"))
        await stack.enter_async_context(background.running(resync.run, "resync"))
        await stack.enter_async_context(background.running(cache.run, "cache"))
        await stack.enter_async_context(background.running(follow, "keys"))

        def health() -> Health:
            limit = max(MIN_LIVENESS_SECONDS, MISSED_INTERVALS * options.interval_seconds)
            oldest = max(loops.oldest_pass_seconds(), cache_loops.oldest_pass_seconds())
            lag, failing = resync.lag_seconds(), background.failing_seconds()
            return Health(lease.is_held, len(loops), oldest, limit, lag, failing)

        await stack.enter_async_context(
            serving(
                health,
                metrics.registry,
                host=every_address(is_ipv6=_is_ipv6()),
                health_port=options.health_port,
                metrics_port=options.metrics_port,
            )
        )
        await cache.tried(CACHE_SECONDS)
        hold_on()
        await stack.enter_async_context(background.running(collect_now_and_then, "garbage"))
        is_watching = True
        for name in cache.names(CACHE_KIND):
            cache_loops.wake(CacheKey(*name))

        async def stop() -> None:
            await asyncio.gather(loops.close(), cache_loops.close())

        await watch(namespaces, loops.wake, stop, seen)


def _loops(
    world: World,
    cluster: KubernetesCluster,
    fetch: Fetch,
    lease: Lease,
    metrics: OperatorMetrics,
    turns: Turns,
    interval_seconds: float,
) -> ServiceLoops:
    def make(key: ServiceKey) -> ServiceLoop:
        return ServiceLoop(
            world,
            key,
            fetch,
            interval_seconds=interval_seconds,
            metrics=metrics,
            may_act=lambda: lease.is_held,
            turns=turns,
        )

    def gone(key: ServiceKey) -> None:
        cluster.forget(key)
        world.scraper.forget(key)
        metrics.forget(key)

    return ServiceLoops(make, gone)


def _cache_loops(
    world: World,
    cluster: KubernetesCluster,
    cache: KubernetesCache,
    api: KubernetesApi,
    lease: Lease,
    metrics: OperatorMetrics,
    interval_seconds: float,
) -> ServiceLoops:
    """Of ModelCaches. api: as services are written with."""
    caches = KubernetesModelCaches(api, lambda: cluster.site, cache)
    turns, told = Turns(WOKEN_PASSES, CLOCKED_PASSES), CacheMetrics(metrics)

    def make(key: ServiceKey) -> ServiceLoop:
        return ServiceLoop(
            world,
            key,
            caches.fetch,
            interval_seconds=interval_seconds,
            metrics=told,
            may_act=lambda: lease.is_held,
            turns=turns,
            take_pass=functools.partial(take_cache_pass, caches, time.time),
        )

    def gone(key: ServiceKey) -> None:
        caches.forget(key)
        told.forget(key)

    return ServiceLoops(make, gone)


def _users(cache: KubernetesCache, key: ServiceKey) -> list[ServiceKey]:
    """Services that name this ModelCache, as far as they are in memory; others see it by their next tick."""
    held = cache.all_in(KIND, key.namespace) or ()
    return [ServiceKey(key.namespace, one["metadata"]["name"]) for one in held if uses(one, key.name)]


def _parser() -> CommandParser:
    parser = CommandParser(prog="headway operator", description=__doc__)
    add = parser.add_argument
    add(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="a namespace to look after; may be repeated; without, or empty: all of them",
    )
    add("--interval-seconds", type=positive, default=5.0, help="time between two passes over a service")
    add("--runtime-image", required=True, help="image of the runtime pods of new revisions")
    add("--gateway-image", required=True, help="image of the gateway pods of new revisions")
    add("--health-port", type=integer(0, 65535), default=8080, help="port of /healthz")
    add("--metrics-port", type=integer(0, 65535), default=9090, help="port of /metrics")
    add(
        "--admin-secret-namespace",
        default=_own_namespace(),
        help="where the operator keeps its key pair and its Lease; its own namespace by default",
    )
    add(
        "--monitoring-namespace",
        default="monitoring",
        help="where Prometheus runs, which may then read replicas; empty: nowhere (default %(default)s)",
    )
    add(
        "--monitoring-label",
        action="append",
        type=_label,
        default=[],
        metavar="KEY=VALUE",
        help="a label of every PodMonitor and PrometheusRule, by which a Prometheus selects; may be repeated",
    )
    add(
        "--runbook-url",
        default="",
        type=_page,
        metavar="URL",
        help="where docs/operations.md is published; alerts on services then carry it; empty: they do not",
    )
    add(
        "--image-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a Secret in the namespace of each service, with which its pods pull images; may be repeated",
    )
    add(
        "--allow-unrestricted-templates",
        action="store_true",
        help="let spec.template leave the pod security standard `restricted`: host paths, root, tokens",
    )
    add("--log-level", choices=LOG_LEVELS, default="info")
    add("--log-format", choices=LOG_FORMATS, default="text", help="lines for people, or an object each")
    return parser


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if equals and re.fullmatch(LABEL_KEY_PATTERN, key) and re.fullmatch(LABEL_VALUE_PATTERN, value):
        return key, value
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a label; give KEY=VALUE, for example release=prometheus"
    )


def _page(text: str) -> str:
    # Prometheus reads annotations as templates, and a section of the page comes behind it.
    if re.fullmatch(RUNBOOK_PATTERN, text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not the address of a page; give http:// or https:// and no fragment, for example "
        "https://docs.example/headway/operations.html"
    )


def _identity() -> str:
    """A pod's name is its own: a crashed container takes its Lease up again. Elsewhere, one per start."""
    hostname = socket.gethostname()
    return hostname if POD_NAMESPACE_FILE.exists() else f"{hostname}-{uuid.uuid4().hex[:8]}"


def _own_namespace() -> str:
    return _pod_namespace() or os.environ.get("POD_NAMESPACE", "default")


def _is_ipv6() -> bool:
    """Whether the cluster that this pod runs in has IPv6 first, as the API server's own address tells."""
    return ":" in os.environ.get("KUBERNETES_SERVICE_HOST", "")


def _pod_namespace() -> str:
    """Of the pod that this is; "" outside of a cluster, where no NetworkPolicy could let the operator in."""
    return POD_NAMESPACE_FILE.read_text().strip() if POD_NAMESPACE_FILE.exists() else ""
