"""One service from a manifest file, served by this machine: the core of `headway up`, usable from Python.

    async with running_service(Path("service.yaml"), port=8000) as service:
        ...  # service.url answers; service.status is what `kubectl get` would show

The file is read again at every pass, so that saving an edit does what `kubectl apply` would.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_operator.cluster.local import LocalCluster
from headway_operator.cluster.secret import secret_values
from headway_operator.errors import ClusterError, SpecError
from headway_operator.keys import AdminKeys
from headway_operator.local_edits import changes, taken_over
from headway_operator.local_left_aside import as_map
from headway_operator.local_left_aside import warning as left_aside_warning
from headway_operator.loop import ServiceLoop
from headway_operator.model_cache import caches_used
from headway_operator.names import CACHE_KIND, KIND, RUNTIME_CONTAINER
from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Outcome, World
from headway_operator.scrape import Scraper
from headway_operator.spec import Manifest, Service, key_of, parse
from headway_operator.state import ServiceKey
from headway_operator.yaml_file import read_documents

DEFAULT_PORT = 8000
DEFAULT_INTERVAL_SECONDS = 2.0
DEVICES = Path("/dev")
CACHE_REMEDY = (
    "this machine keeps what it has fetched for every service by itself: write the source of the ModelCache "
    "in place of cache://NAME"
)


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """What a file says: one InferenceService, the Secrets and ConfigMaps beside it (name -> key -> value)."""

    service: Manifest
    secrets: Mapping[str, Mapping[str, bytes]]
    config_maps: Mapping[str, Mapping[str, str]]


def read_manifest_file(path: Path) -> ManifestFile:
    """Read `path`. Raises SpecError, `field` being the file, for anything else than described above."""
    documents = read_documents(path)
    kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
    if CACHE_KIND in kinds:
        raise SpecError(str(path), f"holds a {CACHE_KIND}, which a cluster needs; {CACHE_REMEDY}")
    for kind in kinds:
        if kind not in (KIND, "Secret", "ConfigMap"):
            raise SpecError(
                str(path),
                f"holds a document of kind {kind!r}; want one {KIND}, and Secrets and ConfigMaps if any",
            )
    if kinds.count(KIND) != 1:
        raise SpecError(str(path), f"holds {kinds.count(KIND)} documents of kind {KIND}; want exactly one")
    secrets: dict[str, dict[str, bytes]] = {}
    config_maps: dict[str, dict[str, str]] = {}
    for document in documents:
        kind, name = document["kind"], (document.get("metadata") or {}).get("name")
        if kind == KIND:
            continue
        if not isinstance(name, str):
            raise SpecError(str(path), f"holds a {kind} without metadata.name; write one")
        if kind == "Secret":
            secrets[name] = secret_values(document)
        else:
            config_maps[name] = {key: str(text) for key, text in (document.get("data") or {}).items()}
    return ManifestFile(next(d for d in documents if d["kind"] == KIND), secrets, config_maps)


class LocalService:
    """A running service. `on_change` is called whenever anything that can be seen here changes."""

    def __init__(self, path: Path, port: int, interval_seconds: float, on_change: Callable[[], None]) -> None:
        """As `running_service`."""
        self.outcome: Outcome | None = None
        self.file_error = ""
        self.edits: list[str] = []  # a line for each edit of the file that is in force
        self._changes: list[str] | None = None  # of an edit that no pass has followed yet
        self._path = path
        self._interval_seconds = interval_seconds
        self._on_change = on_change
        self._file = read_manifest_file(path)
        self.key = _parsed(self._file.service).key
        self.warning = left_aside_warning(self._file.service)
        self._generation = 1
        self._secrets = dict(self._file.secrets)
        self._config_maps = dict(self._file.config_maps)
        self._keys = AdminKeys.generate()
        self.cluster = LocalCluster(
            # Looked for last: what is wrong with the file is to be told first.
            port=_free_port(port),
            public_pem=self._keys.public_pem,
            secrets=self._secrets,
            config_maps=self._config_maps,
            on_change=on_change,
        )

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return self.cluster.url

    @property
    def status(self) -> Mapping[str, Any]:
        """The status after the last pass; empty before the first."""
        return self.outcome.status if self.outcome is not None else {}

    async def run(self) -> None:
        """Pass over the service until cancelled."""
        async with Scraper(self._keys, time.time) as scraper:
            world = World(self.cluster, scraper, self._keys, time.time)
            loop = ServiceLoop(
                world,
                self.key,
                self.fetch,
                interval_seconds=self._interval_seconds,
                metrics=OperatorMetrics(),
                on_outcome=self._see,
            )
            await loop.run()

    async def fetch(self, key: ServiceKey) -> Manifest:
        """The service as the file has it now; while that cannot be honoured, as it was."""
        try:
            file = read_manifest_file(self._path)
            if key_of(file.service) != key:
                raise SpecError(
                    str(self._path), f"now names {key_of(file.service)}; stop and start to rename"
                )
            _parsed(file.service)
        except (SpecError, ClusterError) as error:
            self.file_error = str(error)
            file = self._file
        else:
            if file != self._file or self.file_error:
                self._changes = [*(self._changes or ()), *changes(self._file, file)]
            self.file_error = ""
        if file.service != self._file.service:
            self._generation += 1
        self._file = file
        self._secrets.clear()
        self._secrets.update(file.secrets)
        self._config_maps.clear()
        self._config_maps.update(file.config_maps)
        metadata = {**file.service["metadata"], "generation": self._generation}
        return {**_with_seen_gpus(file.service), "metadata": metadata, "status": self.cluster.status}

    def _see(self, outcome: Outcome) -> None:
        if self._changes is not None:
            revision = _revision(outcome.status)
            ready = {
                f"{self.key.name}-{one.revision}" for one in self.cluster.processes if one.phase == "ready"
            }
            is_new = revision != _revision(self.status)
            self.edits.append(taken_over(self._changes, is_new_revision=is_new, is_there=revision in ready))
            self._changes = None
        self.outcome = outcome
        self._on_change()


@asynccontextmanager
async def running_service(
    path: Path,
    *,
    port: int = DEFAULT_PORT,
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    on_change: Callable[[], None] = lambda: None,
) -> AsyncIterator[LocalService]:
    """Serve the manifest at `path` while the block runs; leaving it drains and ends every process.

    What was in `service.cluster.workspace` is gone then, but the logs of a run in which something failed.

    port: where clients send requests; 0 takes a free one (see `url`). Raises SpecError for a manifest that
    cannot be honoured, ClusterError when the port is taken.
    """
    service = LocalService(path, port, interval_seconds, on_change)
    async with service.cluster:
        passes = asyncio.create_task(service.run(), name=f"service {service.key}")
        try:
            yield service
        finally:
            passes.cancel()
            await asyncio.gather(passes, return_exceptions=True)


def _parsed(manifest: Manifest) -> Service:
    """A service that this machine can serve. Raises SpecError."""
    service = parse(manifest)
    if names := caches_used(service.spec):
        raise SpecError("spec", f"names cache://{names[0]}, which a cluster needs; {CACHE_REMEDY}")
    return service


def _with_seen_gpus(manifest: Manifest) -> Manifest:
    """A pod sees the GPUs that it asks for, a process all: where there are any it counts as one that asks."""
    spec = parse(manifest).spec
    is_decided = spec.device != "auto" or spec.has_gpu
    if is_decided or not any(DEVICES.glob("nvidia[0-9]*")) or _hides_gpus(manifest):
        return manifest
    return {**manifest, "spec": {**manifest["spec"], "gpu": {}}}


def _hides_gpus(manifest: Manifest) -> bool:
    """Whether the environment of its replicas does: what a template sets over what there is. One of another
    shape than pods have is told of by the first pass."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    containers = as_map(as_map(manifest["spec"].get("template")).get("spec")).get("containers")
    for container in containers if isinstance(containers, list) else ():
        fields = as_map(container)
        variables = fields.get("env") if fields.get("name") == RUNTIME_CONTAINER else ()
        for one in variables if isinstance(variables, list) else ():
            if as_map(one).get("name") == "CUDA_VISIBLE_DEVICES":
                visible = one.get("value", visible if "valueFrom" in one else "")
    return visible in ("", "-1")


def _revision(status: Mapping[str, Any]) -> str:
    return str((status.get("revision") or {}).get("name", ""))


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise ClusterError(
                f"port {port} is not free: {error.strerror}; choose another with --port"
            ) from error
