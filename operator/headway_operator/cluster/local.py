"""The local world: a service's Deployments run as child processes of this one, with no Kubernetes.

Owns the set of processes (how many of each Deployment, which goes first), the gateway's table of replicas and
the gateway's fixed port. One process is `local_process`'s business, Jobs are `local_jobs`'; what should run
is the plan's. A little over 300 lines: every method of `Cluster` is here, and each is a few lines.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from headway_operator.cluster.local_jobs import LocalJobs
from headway_operator.cluster.local_mounts import ConfigMaps, Secrets, file_digest, materialise
from headway_operator.cluster.local_process import LocalProcess
from headway_operator.cluster.local_template import ProcessTemplate, process_template
from headway_operator.cluster.local_workspace import Workspace, write_atomically, write_backends
from headway_operator.errors import ClusterError
from headway_operator.names import COMPONENT_LABEL, GATEWAY_COMPONENT, REVISION_LABEL
from headway_operator.state import ChildKey, Gateway, Manifest, Observed, Replica, Revision, ServiceKey, Site

logger = logging.getLogger(__name__)

MAX_EVENTS = 100
MAX_WAITING_FOR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class LocalEvent:
    """One event on the service."""

    at: float
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(slots=True)
class _Deployment:
    """Wanted state of one Deployment and the processes that run for it."""

    name: str
    component: str
    revision: str
    created_at: float
    replicas: int
    template: ProcessTemplate
    num_made: int = 0
    processes: list[LocalProcess] = field(default_factory=list)


class LocalCluster:
    """`Cluster` for one service on this machine. Use it as `async with`: leaving ends every process."""

    def __init__(
        self,
        *,
        port: int,
        public_pem: str,
        secrets: Secrets | None = None,
        config_maps: ConfigMaps | None = None,
        clock: Callable[[], float] = time.time,
        on_change: Callable[[], None] = lambda: None,
        workspace_parent: Path | None = None,
    ) -> None:
        """port: where the gateway listens. secrets, config_maps: name -> key -> value, for volumes."""
        self.port = port
        self.workspace = Workspace(workspace_parent)
        write_atomically(self.workspace.public_key_file, public_pem.encode())
        self.status: Mapping[str, Any] = {}
        self.events: list[LocalEvent] = []
        self.has_failed = False  # anything, ever: its logs are kept
        self._secrets = {} if secrets is None else secrets
        self._config_maps = {} if config_maps is None else config_maps
        self._clock = clock
        self._on_change = on_change
        self._children: dict[ChildKey, Manifest] = {}
        self._deployments: dict[str, _Deployment] = {}
        self._tasks: dict[LocalProcess, asyncio.Task[None]] = {}
        self._jobs = LocalJobs(self.workspace.logs, self.workspace.results, self._changed)
        self._memory: Mapping[str, Any] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(trust_env=False)
        self._write_backends()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(at_once=exc_type is not None)

    async def close(self, *, at_once: bool = False) -> None:
        """End every process: the gateway first, so that what it has in flight is answered, then the replicas.

        A second call with `at_once` (from another task) cuts the first one short. From now on nothing starts,
        whatever a pass that is still under way applies.
        """
        self._is_closing = True
        self.has_failed = self.has_failed or any(process.is_held_up for process in self._tasks)
        await self._jobs.close()
        for is_last in (False, True):
            for deployment in list(self._deployments.values()):
                if is_last or deployment.component == GATEWAY_COMPONENT:
                    self._remove(deployment)
            if at_once:
                for process in self._tasks:
                    process.stop(at_once=True)
            leaving = [task for process, task in self._tasks.items() if is_last or not process.revision]
            await asyncio.gather(*leaving, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None
        self.workspace.remove(keep_logs=self.has_failed)

    @property
    def site(self) -> Site:
        """No images, ports of the processes' own choice, replicas found through a file."""
        return Site(
            kind="local",
            runtime_image="",
            gateway_image="",
            admin_public_key_path=str(self.workspace.public_key_file),
            gateway_backend_arguments=("--backends-file", str(self.workspace.backends_file)),
            bind_port=0,
        )

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def processes(self) -> tuple[LocalProcess, ...]:
        """Every process, leaving ones included, the gateway first."""
        return tuple(sorted(self._tasks, key=lambda p: (p.revision != "", p.created_at, p.name)))

    async def observe(self, key: ServiceKey) -> Observed:
        """Read the processes as they are now."""
        runtime = [d for d in self._deployments.values() if d.component != GATEWAY_COMPONENT]
        gateways = [p.snapshot() for p in self._tasks if p.revision == ""]
        return Observed(
            revisions=tuple(
                Revision(d.name, d.revision, d.replicas, d.created_at)
                for d in sorted(runtime, key=lambda d: (d.created_at, d.name))
            ),
            replicas=tuple(sorted((p.snapshot() for p in self._tasks if p.revision), key=lambda r: r.name)),
            gateway=_gateway(gateways),
            children=frozenset(self._children),
            url=self.url,
            evaluations=self._jobs.evaluations,
        )

    async def model_caches(self, namespace: str, names: Sequence[str]) -> Mapping[str, Manifest | None]:
        """There are none: this machine keeps what it has fetched for every service by itself."""
        return dict.fromkeys(names)

    async def digests(self, key: ServiceKey, files: Sequence[str]) -> Mapping[str, str]:
        """Of keys in the ConfigMaps beside the service, and of files of this machine."""
        found = {name: file_digest(name, self._config_maps) for name in files}
        return {name: digest for name, digest in found.items() if digest is not None}

    async def apply(self, key: ServiceKey, manifest: Manifest) -> None:
        """Remember the child; a Deployment also gets its processes, a changed one has them replaced."""
        child = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        if child.kind == "Deployment":
            self._apply_deployment(manifest)
        elif child.kind == "Job" and not self._is_closing:
            self._jobs.start(manifest, self._template(manifest, None))
        self._children[child] = manifest

    def _apply_deployment(self, manifest: Manifest) -> None:
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        component = labels[COMPONENT_LABEL]
        is_gateway = component == GATEWAY_COMPONENT
        template = self._template(manifest, self.port if is_gateway else None)
        deployment = self._deployments.get(name)
        if deployment is None:
            revision = "" if is_gateway else labels[REVISION_LABEL]
            deployment = _Deployment(name, component, revision, self._clock(), 1, template)
            self._deployments[name] = deployment
        deployment.replicas = int(manifest["spec"].get("replicas", deployment.replicas))
        if deployment.template.digest != template.digest:
            deployment.template = template
            self._stop_processes(deployment, list(deployment.processes))
        self._fill(deployment)

    def _template(self, manifest: Manifest, port: int | None) -> ProcessTemplate:
        given = {ChildKey("ConfigMap", name): {"data": data} for name, data in self._config_maps.items()}
        mounts = materialise(manifest, {**given, **self._children}, self._secrets, self.workspace.mounts)
        return process_template(manifest, mounts, port, self._secrets)

    async def scale(self, key: ServiceKey, revision: str, replicas: int) -> None:
        """Start processes, or stop those that go first: not ready, lowest deletion cost, newest."""
        deployment = self._deployments.get(revision)
        if deployment is None:
            raise ClusterError(f"cannot scale {revision!r}: there is no such Deployment")
        deployment.replicas = replicas
        surplus = len(deployment.processes) - replicas
        if surplus > 0:
            order = sorted(
                deployment.processes,
                key=lambda p: (p.phase == "ready", p.deletion_cost, -p.created_at, -p.number),
            )
            self._stop_processes(deployment, order[:surplus])
        self._fill(deployment)

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        """Forget the child; a Deployment's processes drain."""
        if child.kind == "Deployment" and child.name in self._deployments:
            self._remove(self._deployments[child.name])
        if child.kind == "Job":
            self._jobs.remove(child.name)
        self._children.pop(child, None)

    async def set_deletion_cost(self, key: ServiceKey, replica: str, cost: int) -> None:
        """Note it on the process; one that has gone needs none."""
        for process in self._tasks:
            if process.name == replica:
                process.deletion_cost = cost

    def declared(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """All of it."""
        return status

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        """Keep it for whoever shows it."""
        self.status = status
        self._on_change()

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Keep the last hundred."""
        self.events.append(LocalEvent(self._clock(), kind, reason, message))
        del self.events[:-MAX_EVENTS]
        self._on_change()

    async def load_memory(self, key: ServiceKey) -> Mapping[str, Any] | None:
        """What was saved since the start; a new start has no history of its own."""
        return self._memory

    async def repair(self, key: ServiceKey, child: ChildKey) -> None:
        """Nobody else changes what this process keeps."""

    async def check_alone(self, key: ServiceKey) -> None:
        """There is no other."""

    async def save_memory(self, key: ServiceKey, memory: Mapping[str, Any], until: float) -> None:
        """Keep it in this process."""
        self._memory = memory

    def _fill(self, deployment: _Deployment) -> None:
        if self._session is None:
            raise ClusterError("the local world is closed")
        wanted = 0 if self._is_closing else deployment.replicas
        if deployment.component == GATEWAY_COMPONENT:
            # There is one port: the next gateway starts when the last one has gone (see _forget).
            wanted = min(wanted, 0 if any(not p.revision for p in self._tasks) else 1)
        while len(deployment.processes) < wanted:
            process = LocalProcess(
                name=f"{deployment.name}-{deployment.num_made}",
                number=deployment.num_made,
                revision=deployment.revision,
                template=deployment.template,
                folder_of_ports=self.workspace.ports,
                folder_of_logs=self.workspace.logs,
                session=self._session,
                clock=self._clock,
                on_change=self._changed,
            )
            deployment.num_made += 1
            deployment.processes.append(process)
            task = asyncio.create_task(process.run(), name=process.name)
            self._tasks[process] = task
            task.add_done_callback(functools.partial(self._forget, process))

    def _stop_processes(self, deployment: _Deployment, processes: list[LocalProcess]) -> None:
        for process in processes:
            deployment.processes.remove(process)
            process.stop()

    def _remove(self, deployment: _Deployment) -> None:
        self._deployments.pop(deployment.name, None)
        self._stop_processes(deployment, list(deployment.processes))

    def _forget(self, process: LocalProcess, task: asyncio.Task[None]) -> None:
        del self._tasks[process]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The supervisor of %s failed; it is started anew", process.name, exc_info=error)
        for deployment in self._deployments.values():
            if process in deployment.processes:
                deployment.processes.remove(process)
            if self._session is not None and process.revision == deployment.revision:
                self._fill(deployment)
        self._changed()

    def _changed(self) -> None:
        self.has_failed = (
            self.has_failed
            or any(process.phase == "failed" for process in self._tasks)
            or any(one.phase in ("ended", "timed_out") and not one.output for one in self._jobs.evaluations)
        )
        if self._session is not None:
            self._write_backends()
        self._on_change()

    def _write_backends(self) -> None:
        write_backends(
            self.workspace.backends_file,
            [
                {"id": process.name, "url": process.address, "state": process.phase}
                for process in self._tasks
                if process.revision and process.address and process.phase in ("ready", "draining")
            ],
            waiting_for=_waiting_for([p.snapshot() for p in self.processes if p.revision]),
        )


def _waiting_for(replicas: list[Replica]) -> str:
    """What the first replica does, or why it fails, that is not ready and says so."""
    for replica in replicas:
        words = ": ".join(part for part in (replica.reason, replica.message) if part)
        if words and replica.phase in ("starting", "failed"):
            return f"{replica.name}: {words}"[:MAX_WAITING_FOR_CHARACTERS]
    return ""


def _gateway(replicas: list[Replica]) -> Gateway:
    ready = [r for r in replicas if r.phase == "ready"]
    worst = next((r for r in replicas if r.phase != "ready" and r.reason), None)
    return Gateway(
        ready=bool(ready),
        addresses=tuple(r.address for r in ready if r.address),
        reason=worst.reason if worst else "",
        message=worst.message if worst else "",
    )
