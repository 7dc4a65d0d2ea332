"""Kubernetes' list of backends: the EndpointSlices of one headless Service, listed and then watched.

List, then watch from the list's resourceVersion; a watch that ends by its time limit goes on from the last
version seen, 410 Gone lists again, and any error lists again after a pause that doubles from 0.2 s to 10 s.
While the API server is away the last list stays: replicas are still there.

An endpoint is ready when it serves and is not terminating. `serving` is read rather than `ready`, which a
Service with publishNotReadyAddresses sets for every pod.

The one module of the gateway that imports kubernetes, and imported only where it is needed.
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from headway_gateway.backend import BackendEntry, BackendState
from headway_gateway.config import ServiceReference
from headway_gateway.errors import BackendListError, ConfigError

LIST_TIMEOUT_SECONDS = 10.0
WATCH_SECONDS = 60
WATCH_GRACE_SECONDS = 10.0  # past WATCH_SECONDS the API server itself is taken for dead
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
PORT_NAME = "http"
log = logging.getLogger(__name__)

Slice = Mapping[str, Any]


class _ExpiredError(Exception):
    """The API server no longer has our resourceVersion."""


# ValueError: aiohttp's word for a line longer than its buffer.
_RECOVERABLE = (aiohttp.ClientError, client.ApiException, BackendListError, OSError, TimeoutError, ValueError)


class EndpointSliceWatch:
    """Keeps the pool on the current endpoints of one Service; hands every list to `on_list`.

    `on_seen` is called whenever the API server has said that the last list is the current one.
    """

    def __init__(
        self,
        service: ServiceReference,
        on_list: Callable[[Sequence[BackendEntry]], None],
        on_error: Callable[[], None],
        on_seen: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._on_list = on_list
        self._on_error = on_error
        self._on_seen = on_seen
        self._slices: dict[str, Slice] = {}

    async def run(self) -> None:
        """Follow the Service for ever."""
        async with client.ApiClient(configuration=await _load_configuration()) as api_client:
            await self._follow(client.DiscoveryV1Api(api_client))

    async def _follow(self, api: client.DiscoveryV1Api) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                version = await self._list(api)
                pause = FIRST_PAUSE_SECONDS
                while True:
                    version = await self._watch(api, version)
                    await asyncio.sleep(
                        FIRST_PAUSE_SECONDS
                    )  # a server that ends watches at once is not hammered
            except _ExpiredError:
                log.info("the watch of %s expired; listing again", self._service)
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            except _RECOVERABLE as error:
                self._on_error()
                log.warning(
                    "kept the last list of backends; asking the API server again in %.1f s: %s: %s",
                    pause,
                    type(error).__name__,
                    error,
                )
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _list(self, api: client.DiscoveryV1Api) -> str:
        response = await api.list_namespaced_endpoint_slice_without_preload_content(
            self._service.namespace, label_selector=self._selector, _request_timeout=LIST_TIMEOUT_SECONDS
        )
        try:
            _check_status(response.status)
            answer = _parse(await response.read())
        finally:
            response.close()
        self._slices = {_name(item): item for item in answer.get("items") or []}
        self._publish()
        self._on_seen()
        return _resource_version(answer)

    async def _watch(self, api: client.DiscoveryV1Api, version: str) -> str:
        """Apply events until the server ends the watch; the resourceVersion to go on from."""
        response = await api.list_namespaced_endpoint_slice_without_preload_content(
            self._service.namespace,
            label_selector=self._selector,
            resource_version=version,
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=WATCH_SECONDS + WATCH_GRACE_SECONDS,
        )
        try:
            _check_status(response.status)
            self._on_seen()
            async for line in response.content:
                version = self._apply(_parse(line))
                self._on_seen()
        finally:
            response.close()
        return version

    def _apply(self, event: Mapping[str, Any]) -> str:
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, dict):
            raise BackendListError(f"a watch event has object={item!r}; expected an EndpointSlice")
        if kind == "ERROR":
            _check_status(item.get("code"))
            raise BackendListError(f"the watch ended with {item.get('reason')!r}: {item.get('message')!r}")
        if kind in ("ADDED", "MODIFIED"):
            self._slices[_name(item)] = item
            self._publish()
        elif kind == "DELETED":
            self._slices.pop(_name(item), None)
            self._publish()
        return _resource_version(item)

    def _publish(self) -> None:
        self._on_list(to_entries(self._slices.values()))

    @property
    def _selector(self) -> str:
        return f"kubernetes.io/service-name={self._service.name}"


def to_entries(slices: Iterable[Slice]) -> list[BackendEntry]:
    """The backends of all slices. A pod in two slices (dual stack, or moving) counts once, at its best."""
    entries: dict[str, BackendEntry] = {}
    for item in sorted(slices, key=_name):
        port = _port(item)
        for endpoint in item.get("endpoints") or [] if port is not None else []:
            addresses = endpoint.get("addresses") or []
            if not addresses:
                continue
            host = f"[{addresses[0]}]" if item.get("addressType") == "IPv6" else addresses[0]
            url = f"http://{host}:{port}"
            name = (endpoint.get("targetRef") or {}).get("name") or url
            entry = BackendEntry(id=name, url=url, state=_state(endpoint.get("conditions") or {}))
            known = entries.get(name)
            if known is None or (known.state != "ready" and entry.state == "ready"):
                entries[name] = entry
    return list(entries.values())


def _state(conditions: Mapping[str, Any]) -> BackendState:
    if conditions.get("terminating"):
        return "draining"
    serving = conditions.get("serving")
    if serving is None:
        serving = conditions.get("ready")
    return "unready" if serving is False else "ready"  # unknown counts as ready, as the API says


def _port(item: Slice) -> int | None:
    ports = item.get("ports") or []
    named = [port for port in ports if port.get("name") == PORT_NAME] or (ports if len(ports) == 1 else [])
    return named[0].get("port") if named else None


def _name(item: Slice) -> str:
    name = (item.get("metadata") or {}).get("name")
    if not isinstance(name, str):
        raise BackendListError(f"an EndpointSlice has metadata.name={name!r}")
    return name


def _resource_version(item: Mapping[str, Any]) -> str:
    version = (item.get("metadata") or {}).get("resourceVersion")
    if not isinstance(version, str):
        raise BackendListError(f"the API server sent metadata.resourceVersion={version!r}")
    return version


def _check_status(status: int | None) -> None:
    if status == 410:
        raise _ExpiredError
    if status is not None and status != 200:
        raise BackendListError(
            f"the API server answered {status}; may this service account list EndpointSlices?"
        )


def _parse(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise BackendListError(f"the API server sent no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise BackendListError(f"the API server sent {answer!r}; expected an object")
    return answer


async def _load_configuration() -> client.Configuration:
    """In a pod its service account, elsewhere the current context of the kubeconfig."""
    configuration = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise ConfigError(f"--kubernetes-service: no way to the API server: {error}") from None
    return configuration
