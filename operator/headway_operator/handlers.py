"""What kopf is used for, and the only place that imports it: to hear which services exist and of each change.

kopf's own handlers for creation and update are edge-triggered and leave marks on the object; only raw events
are used here, which leave none and need no finalizer. An event says no more than "look at this service now":
what is to be done is read afresh by each pass. Ownership by reference cleans up when a service is deleted.

Nothing that the API server does ends the watching: kopf asks again for as long as it takes, begins anew after
a watch that has expired (410) or says nothing although bookmarks are due, and is itself begun anew should it
give up.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import kopf

from headway_operator.names import GROUP, PLURAL, VERSION
from headway_operator.resync import Version, version_of
from headway_operator.state import ServiceKey

logger = logging.getLogger(__name__)

SERVER_TIMEOUT_SECONDS = 300  # a whole number: the API server refuses `300.0`
CONNECT_TIMEOUT_SECONDS = 10.0
REQUEST_TIMEOUT_SECONDS = 30.0
# The API server sends a bookmark every minute, or a little later.
INACTIVITY_SECONDS = 150.0
FIRST_BACKOFFS_SECONDS = (1.0, 1.0, 2.0, 3.0)
LONGEST_BACKOFF_SECONDS = 5.0
RESTART_SECONDS = 5.0
# kopf gives each object that it hears of a worker, which waits for more to come of the same one. All that a
# worker does here is to remember a version and wake a loop: none of them needs to stay, and their number
# needs no limit. A limit is one on events: of 20 workers that stay kopf's 5 s come four objects a second.
WORKER_IDLE_SECONDS = 0.05


async def watch(
    namespaces: Sequence[str],
    on_change: Callable[[ServiceKey], None],
    on_stop: Callable[[], Awaitable[None]],
    seen: MutableMapping[ServiceKey, Version],
) -> None:
    """Call `on_change` for every service there is and at each later change, until SIGTERM or SIGINT.

    namespaces: those to watch; none watches all. on_stop: ends what `on_change` began; kopf cancels without
    ceremony every task that outlives it. seen: gets the version of each service that was shown.
    """
    while True:
        try:
            await kopf.operator(
                registry=make_registry(on_change, on_stop, seen),
                settings=make_settings(is_namespaced=bool(namespaces)),
                namespaces=namespaces,
                clusterwide=not namespaces,
                standalone=True,
            )
            return
        except Exception:
            # Whatever the API server said: without a watch the operator would be of little use.
            logger.exception("the watch ended; it begins anew in %g s", RESTART_SECONDS)
            seen.clear()
            await asyncio.sleep(RESTART_SECONDS)


class Backoffs:
    """Seconds between the attempts of one request: few at first, then always the same, without an end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(FIRST_BACKOFFS_SECONDS, itertools.repeat(LONGEST_BACKOFF_SECONDS))


def make_registry(
    on_change: Callable[[ServiceKey], None],
    on_stop: Callable[[], Awaitable[None]],
    seen: MutableMapping[ServiceKey, Version],
) -> kopf.OperatorRegistry:
    """One event handler, and credentials from the pod's service account or else the kubeconfig."""
    registry = kopf.OperatorRegistry()
    deleted_at: dict[ServiceKey, object] = {}

    async def see_service(event: Mapping[str, Any], **_: object) -> None:
        metadata = event["object"]["metadata"]
        key, version = ServiceKey(metadata["namespace"], metadata["name"]), version_of(metadata)
        if event["type"] == "DELETED":
            seen.pop(key, None)
            deleted_at.pop(key, None)
        else:
            # Writes of the status come back as events too; they are no reason for another pass.
            deletion = metadata.get("deletionTimestamp")
            if seen.get(key) == version and deleted_at.get(key) == deletion:
                return
            seen[key], deleted_at[key] = version, deletion
        on_change(key)

    def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_via_client(**kwargs)

    async def clean_up(**_: object) -> None:
        await on_stop()

    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(see_service)
    kopf.on.login(registry=registry)(log_in)
    kopf.on.cleanup(registry=registry)(clean_up)
    return registry


def make_settings(*, is_namespaced: bool) -> kopf.OperatorSettings:
    """No marks, no events of kopf's own, a time limit on everything."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # Roles in some namespaces may see neither namespaces nor CRDs.
    settings.scanning.disabled = is_namespaced
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = SERVER_TIMEOUT_SECONDS + REQUEST_TIMEOUT_SECONDS
    settings.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    settings.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = Backoffs()
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = WORKER_IDLE_SECONDS
    return settings
