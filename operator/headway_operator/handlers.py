"""What kopf is used for, and the only place that imports it: to hear which services exist and of each change.

kopf's own handlers for creation and update are edge-triggered and leave marks on the object; only raw events
are used here, which leave none and need no finalizer. An event says no more than "look at this service now":
what is to be done is read afresh by each pass. Ownership by reference cleans up when a service is deleted.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from headway_operator.names import GROUP, PLURAL, VERSION
from headway_operator.state import ServiceKey

SERVER_TIMEOUT_SECONDS = 300  # a whole number: the API server refuses `300.0`
CONNECT_TIMEOUT_SECONDS = 10.0
REQUEST_TIMEOUT_SECONDS = 30.0
WORKER_LIMIT = 20


async def watch(
    namespace: str,
    on_change: Callable[[ServiceKey], None],
    on_stop: Callable[[], Awaitable[None]],
) -> None:
    """Call `on_change` for every service there is and at each later change, until SIGTERM or SIGINT.

    namespace: the one to watch; "" watches all. on_stop: ends what `on_change` began; kopf cancels without
    ceremony every task that outlives it.
    """
    await kopf.operator(
        registry=make_registry(on_change, on_stop),
        settings=make_settings(namespace),
        namespaces=[namespace] if namespace else [],
        clusterwide=not namespace,
        standalone=True,
    )


def make_registry(
    on_change: Callable[[ServiceKey], None], on_stop: Callable[[], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """One event handler, and credentials from the pod's service account or else the kubeconfig."""
    registry = kopf.OperatorRegistry()
    last_seen: dict[ServiceKey, tuple[object, ...]] = {}

    async def see_service(event: Mapping[str, Any], **_: object) -> None:
        metadata = event["object"]["metadata"]
        key = ServiceKey(metadata["namespace"], metadata["name"])
        # Writes of the status come back as events too; they are no reason for another pass.
        seen = (metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp"), event["type"])
        if event["type"] == "DELETED":
            last_seen.pop(key, None)
        elif last_seen.get(key, ())[:3] == seen[:3]:
            return
        else:
            last_seen[key] = seen
        on_change(key)

    def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_via_client(**kwargs)

    async def clean_up(**_: object) -> None:
        await on_stop()

    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(see_service)
    kopf.on.login(registry=registry)(log_in)
    kopf.on.cleanup(registry=registry)(clean_up)
    return registry


def make_settings(namespace: str) -> kopf.OperatorSettings:
    """No marks, no events of kopf's own, a time limit on everything."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # A role in one namespace may see neither namespaces nor CRDs.
    settings.scanning.disabled = bool(namespace)
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = SERVER_TIMEOUT_SECONDS + REQUEST_TIMEOUT_SECONDS
    settings.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    settings.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.networking.enforce_retry_after = True
    settings.queueing.worker_limit = WORKER_LIMIT
    return settings
