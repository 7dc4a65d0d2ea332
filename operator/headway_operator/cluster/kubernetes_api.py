"""Calls to the Kubernetes API in plain dictionaries: each with a time limit and an error of our own tree.

Connection, TLS and credentials are the official client's (`kubernetes.aio`); objects stay as JSON, since most
of what is written here are manifests that were rendered as such. Knows no kind of ours.

What is written for services goes through a `guarded` view, which refuses every write while the operator does
not lead and every call while the API server has asked to wait; the Lease itself needs neither.
"""

import asyncio
import copy
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.request import getproxies

import aiohttp
import msgspec
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from headway_operator.cluster.kubernetes_answers import error_of, retry_after_seconds
from headway_operator.cluster.kubernetes_fence import checked_before_sending, fence
from headway_operator.cluster.kubernetes_paths import path_of
from headway_operator.errors import ClusterError, NotLeadingError, ThrottledError, UnavailableError
from headway_operator.names import FIELD_MANAGER

TIMEOUT_SECONDS = 10.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA_ITEM = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
# Objects of one answer: a list of thousands would hold everything else up while it is read.
LIST_LIMIT = 250
# How long the API server lets a watch be; all of them end at different times.
WATCH_SECONDS = (240, 360)
# The API server sends a bookmark every minute, or a little later.
INACTIVITY_SECONDS = 150.0
WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS, sock_read=INACTIVITY_SECONDS)
Json = dict[str, Any]
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
# method, HTTP status (0 when there was no answer), seconds.
OnCall = Callable[[str, int, float], None]


# What the official client raises, beside its own error, for a file that is YAML and no kubeconfig.
_BROKEN_FILE = (AttributeError, KeyError, TypeError, ValueError)


def _no_credentials(kubeconfig: Path | None, error: Exception) -> str:
    """What is wrong with them, in a line, and what helps."""
    if kubeconfig is None:
        why = " ".join(str(error).split())
        return f"no usable credentials for a cluster: {why}; set KUBECONFIG, or run inside a pod"
    if not kubeconfig.is_file():
        return f"--kubeconfig={str(kubeconfig)!r}: there is no such file"
    why = " ".join(str(error).split()) or type(error).__name__
    return f"--kubeconfig={str(kubeconfig)!r} is no usable kubeconfig: {why}; give one that kubectl can read"


class KubernetesApi:
    """One connection pool to one API server. Use it as `async with`."""

    def __init__(
        self,
        configuration: Configuration,
        timeout_seconds: float = TIMEOUT_SECONDS,
        on_call: OnCall = lambda method, status, seconds: None,
    ) -> None:
        """on_call: hears of each call that was made."""
        configuration.retries = None  # a pass that fails is taken again; retries inside would only hide it
        configuration.trace_configs = [fence()]
        # Else each call looks for a proxy, and for a .netrc, in threads, which takes longer than the call.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
        self._configuration = configuration
        self._timeout_seconds = timeout_seconds
        self._client: ApiClient | None = None
        self._watches: ApiClient | None = None
        self._on_call = on_call
        self._may_write: Callable[[], bool] = lambda: True
        self._obeys_throttling = False
        self._throttled_until = 0.0

    def guarded(self, may_write: Callable[[], bool]) -> "KubernetesApi":
        """A view of the same connections that writes only while `may_write()`, and waits when asked to.

        Its calls raise NotLeadingError, or ThrottledError, instead of being made.
        """
        view = KubernetesApi(self._configuration, self._timeout_seconds, self._on_call)
        view._client, view._watches = self._client, self._watches
        view._may_write = may_write
        view._obeys_throttling = True
        return view

    @classmethod
    async def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        on_call: OnCall = lambda method, status, seconds: None,
    ) -> "KubernetesApi":
        """The pod's own service account, or what a kubeconfig says; ClusterError when neither is usable.

        kubeconfig: when given, used even inside a pod. context: of the kubeconfig; else its current one.
        """
        configuration = Configuration()
        is_in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            if kubeconfig is None and context is None and is_in_pod:
                config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            else:
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=None if kubeconfig is None else str(kubeconfig),
                    context=context,
                    client_configuration=configuration,
                )
        except (config.ConfigException, yaml.YAMLError, *_BROKEN_FILE, OSError) as error:
            raise ClusterError(_no_credentials(kubeconfig, error)) from error
        return cls(configuration, on_call=on_call)

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._configuration)
        # A watch holds its connection for minutes. There is one for each kind and namespace: with a dozen of
        # namespaces they are more than the client would open at once, and no call would have its turn.
        endless = copy.copy(self._configuration)
        endless.connection_pool_maxsize = 0
        self._watches = ApiClient(endless)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for client in (self._client, self._watches):
            if client is not None:
                await client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """The object, or None when there is none."""
        return await self._call("GET", path_of(kind, namespace, name), absent_is_none=True)

    async def list(self, kind: str, namespace: str, labels: str = "", fields: str = "") -> list[Json]:
        """The objects of a kind in a namespace, or in all ("") of them, that match both selectors."""
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {name: selector for name, selector in selectors.items() if selector}
        answer = await self._call("GET", path_of(kind, namespace), query=query)
        return list((answer or {}).get("items") or ())

    async def log_tail(self, namespace: str, pod: str, container: str, lines: int) -> str:
        """The last lines that a container of a pod has said; "" when the pod is gone."""
        query = {"container": container, "tailLines": str(lines)}
        path = path_of("Pod", namespace, pod, "log")
        raw = await self._ask("GET", path, query=query, accept="*/*", absent_is_none=True)
        return "" if raw is None else raw.decode(errors="replace")

    async def served_kinds(self, api_version: str) -> frozenset[str]:
        """The kinds that the server has now in one version of an API group; none where it lacks that."""
        answer = await self._call("GET", f"/apis/{api_version}", absent_is_none=True)
        return frozenset(str(one["kind"]) for one in (answer or {}).get("resources") or ())

    async def list_metadata(self, kind: str, namespace: str) -> tuple[Json, ...]:
        """The metadata of all objects of a kind, in a namespace or all (""), from the API server's memory."""
        answer = await self._call(
            "GET", path_of(kind, namespace), query={"resourceVersion": "0"}, accept=METADATA_LIST
        )
        return tuple(dict(item["metadata"]) for item in (answer or {}).get("items") or ())

    async def list_all(
        self,
        kind: str,
        namespace: str,
        labels: str,
        *,
        is_bare: bool,
        kept: Callable[[Json], Json] = lambda item: item,
    ) -> tuple[tuple[Json, ...], str]:
        """All objects of a kind, in parts, and the version of the list. is_bare: their metadata alone.

        kept: what is wanted of each, so that no more than one part is ever in memory whole.
        """
        query = {"limit": str(LIST_LIMIT)} | ({"labelSelector": labels} if labels else {})
        accept = METADATA_LIST if is_bare else JSON
        items: list[Json] = []
        while True:
            answer = await self._call("GET", path_of(kind, namespace), query=query, accept=accept) or {}
            items += map(kept, answer.get("items") or ())
            if not (more := answer["metadata"].get("continue")):
                return tuple(items), answer["metadata"]["resourceVersion"]
            query = {**query, "continue": more}

    async def watch(
        self, kind: str, namespace: str, labels: str, version: str, *, is_bare: bool
    ) -> AsyncIterator[Json]:
        """Events since `version`, until the API server ends the watch. A version that has expired is one,
        too.

        Raises UnavailableError when nothing comes although bookmarks are due.
        """
        if self._watches is None:
            raise RuntimeError("KubernetesApi is used outside its `async with` block")
        path = path_of(kind, namespace)
        what, began, status = f"WATCH {path}", time.monotonic(), 0
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(random.randint(*WATCH_SECONDS))}
        query |= {"labelSelector": labels} if labels else {}
        self._check_guard("GET", what)
        try:
            try:
                request = await self._watches.param_serialize(
                    "GET",
                    path,
                    query_params=list(query.items()),
                    header_params={"Accept": METADATA_ITEM if is_bare else JSON},
                    auth_settings=["BearerToken"],
                )
                answer = (await self._watches.call_api(*request, _request_timeout=WATCH_TIMEOUT)).response
                status = answer.status
            finally:
                self._on_call("WATCH", status, time.monotonic() - began)
            try:
                if status != 200:
                    raw = await answer.read()
                    if status == 410:
                        yield {"type": "ERROR", "object": {"code": 410}}
                        return
                    raise error_of(what, status, raw)
                async for line in answer.content:
                    yield msgspec.json.decode(line)
            finally:
                # Without TLS' goodbye, whose answer nobody waits for: a loop that ends would leave it open.
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()
                answer.close()
        except TimeoutError as error:
            raise UnavailableError(f"{what}: nothing came for {INACTIVITY_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error

    async def apply(self, manifest: Mapping[str, Any], *, force: bool, subresource: str = "") -> Json:
        """Server-side apply with Headway's field manager; `force` takes over fields that others own."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        return await self._call("PATCH", path, query=query, body=manifest, content_type=APPLY) or {}

    async def patch(
        self, kind: str, namespace: str, name: str, body: Mapping[str, Any], subresource: str = ""
    ) -> Json | None:
        """JSON merge patch; None when the object is gone."""
        return await self._call(
            "PATCH",
            path_of(kind, namespace, name, subresource),
            query={"fieldManager": FIELD_MANAGER},
            body=body,
            content_type=MERGE,
            absent_is_none=True,
        )

    async def create(self, manifest: Mapping[str, Any]) -> Json:
        """Create; ConflictError when it exists already."""
        path = path_of(manifest["kind"], manifest["metadata"]["namespace"])
        return await self._call("POST", path, query={"fieldManager": FIELD_MANAGER}, body=manifest) or {}

    async def replace(self, manifest: Mapping[str, Any]) -> Json:
        """Replace; ConflictError when its resourceVersion is no longer the current one."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"])
        return await self._call("PUT", path, query={"fieldManager": FIELD_MANAGER}, body=manifest) or {}

    async def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete with what it owns, in the background; absent is success."""
        query = {"propagationPolicy": "Background"}
        await self._call("DELETE", path_of(kind, namespace, name), query=query, absent_is_none=True)

    async def _call(
        self,
        method: Method,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        absent_is_none: bool = False,
    ) -> Json | None:
        raw = await self._ask(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            accept=accept,
            absent_is_none=absent_is_none,
        )
        if raw is None:
            return None
        try:
            answer = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{method} {path}: answered no JSON: {error}") from error
        return answer if isinstance(answer, dict) else None

    async def _ask(
        self,
        method: Method,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        absent_is_none: bool = False,
    ) -> bytes | None:
        if self._client is None:
            raise RuntimeError("KubernetesApi is used outside its `async with` block")
        what = f"{method} {path}"
        self._check_guard(method, what)
        began, status = time.monotonic(), 0
        try:
            async with asyncio.timeout(self._timeout_seconds):
                request = await self._client.param_serialize(
                    method,
                    path,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": accept, "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                with checked_before_sending(lambda: self._check_leading(method, what)):
                    response = await self._client.call_api(*request)
                raw: bytes = await response.read()  # type: ignore[no-untyped-call]
                status = response.status
        except TimeoutError as error:
            raise UnavailableError(f"{what}: no answer within {self._timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error
        finally:
            self._on_call(method, status, time.monotonic() - began)
        if status == 404 and absent_is_none:
            return None
        if not 200 <= status < 300:
            if wait := retry_after_seconds(status, response.headers):
                self._throttled_until = time.monotonic() + wait
            raise error_of(what, status, raw)
        return raw

    def _check_guard(self, method: str, what: str) -> None:
        self._check_leading(method, what)
        left = self._throttled_until - time.monotonic()
        if self._obeys_throttling and left > 0:
            raise ThrottledError(f"{what}: the API server asked to wait, for another {left:.1f} s")

    def _check_leading(self, method: str, what: str) -> None:
        if method != "GET" and not self._may_write():
            raise NotLeadingError(f"{what}: this operator does not hold the Lease")
