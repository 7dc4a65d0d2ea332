"""Calls to the Kubernetes API in plain dictionaries: each with a time limit and an error of our own tree.

Connection, TLS and credentials are the official client's (`kubernetes.aio`); objects stay as JSON, since most
of what is written here are manifests that were rendered as such. Knows no kind of ours.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from headway_operator.errors import ClusterError, ConflictError, ForbiddenError, UnavailableError
from headway_operator.names import API_VERSION, FIELD_MANAGER, KIND, PLURAL

TIMEOUT_SECONDS = 10.0
PLURALS = {
    "Deployment": "deployments",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "Pod": "pods",
    "Event": "events",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "Job": "jobs",
    "Lease": "leases",
    KIND: PLURAL,
}
API_VERSIONS = {
    "Deployment": "apps/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "Job": "batch/v1",
    "Lease": "coordination.k8s.io/v1",
    KIND: API_VERSION,
}
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
RETRIED_LATER = frozenset((408, 429, 500, 502, 503, 504))
Json = dict[str, Any]


class KubernetesApi:
    """One connection pool to one API server. Use it as `async with`."""

    def __init__(self, configuration: Configuration, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        configuration.retries = None  # a pass that fails is taken again; retries inside would only hide it
        self._configuration = configuration
        self._timeout_seconds = timeout_seconds
        self._client: ApiClient | None = None

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, context: str | None = None) -> "KubernetesApi":
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
        except (config.ConfigException, OSError) as error:
            raise ClusterError(
                f"no usable credentials for a cluster: {error}; set KUBECONFIG, or run inside a pod"
            ) from error
        return cls(configuration)

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._configuration)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """The object, or None when there is none."""
        return await self._call("GET", path_of(kind, namespace, name), absent_is_none=True)

    async def list(self, kind: str, namespace: str, labels: str = "") -> list[Json]:
        """The objects of a kind in a namespace that match a label selector."""
        query = {"labelSelector": labels} if labels else {}
        answer = await self._call("GET", path_of(kind, namespace), query=query)
        return list((answer or {}).get("items") or ())

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
        method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"],
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        absent_is_none: bool = False,
    ) -> Json | None:
        if self._client is None:
            raise RuntimeError("KubernetesApi is used outside its `async with` block")
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(self._timeout_seconds):
                request = await self._client.param_serialize(
                    method,
                    path,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                response = await self._client.call_api(*request)
                raw: bytes = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise UnavailableError(f"{what}: no answer within {self._timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error
        if response.status == 404 and absent_is_none:
            return None
        if not 200 <= response.status < 300:
            raise _error(what, response.status, raw)
        answer = json.loads(raw)
        return answer if isinstance(answer, dict) else None


def path_of(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """The REST path of a collection, an object or its subresource."""
    version = API_VERSIONS.get(kind, "v1")
    prefix = "/api" if "/" not in version else "/apis"
    parts = [prefix, version, "namespaces", namespace, PLURALS[kind], name, subresource]
    return "/".join(part for part in parts if part)


def _error(what: str, status: int, raw: bytes) -> ClusterError:
    try:
        message = str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode(errors="replace")
    text = f"{what}: {status}: {message}"
    if status == 409:
        return ConflictError(text)
    if status in (401, 403):
        return ForbiddenError(text)
    return UnavailableError(text) if status in RETRIED_LATER else ClusterError(text)
