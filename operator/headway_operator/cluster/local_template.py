"""Reads from a Deployment or Job what a kubelet would: what to run, with which environment, grace, probes.

Pure. A field that changes how the process itself runs, and that cannot be honoured here, is refused by name.
What only says where and as whom a pod runs on a cluster (placement, security contexts, image pulls, preStop)
has no counterpart on one machine and is left aside.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway_operator.errors import ClusterError
from headway_operator.spec.quantity import parse_quantity
from headway_operator.state import Manifest

Secrets = Mapping[str, Mapping[str, bytes]]
NO_SECRETS: Secrets = {}
HEADWAY_COMMAND = (sys.executable, "-m", "headway")
DEFAULT_GRACE_SECONDS = 30.0
# What to do instead, by the field that the local world does not have.
REFUSED_IN_POD = {
    "hostAliases": "write the addresses where the names are used",
    "dnsConfig": "configure this machine's own resolver",
    "runtimeClassName": "remove it",
}
# The engine's, long and short.
RANKS_FLAGS = ("--tensor-parallel-size", "-tp")
REFUSED_IN_CONTAINER = {
    "envFrom": "use env with values",
    "workingDir": "write absolute paths",
    "volumeDevices": "remove them",
    "stdin": "remove it",
    "tty": "remove it",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """An HTTP probe of a container. The port is the one the process chose."""

    path: str
    period_seconds: float
    timeout_seconds: float
    failure_threshold: int


@dataclass(frozen=True, slots=True)
class ProcessTemplate:
    """Everything needed to start one process of a Deployment, except its name, port file and lifeline.

    digest changes exactly when the Deployment's pod template does. own_folders: those of emptyDir volumes;
    each process is to have one of its own (`for_process`).
    """

    digest: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    grace_seconds: float
    ready: Probe
    startup_seconds: float
    live: Probe | None
    own_folders: tuple[str, ...] = ()


def process_template(
    deployment: Manifest, mounts: Mapping[str, Path], port: int | None = None, secrets: Secrets = NO_SECRETS
) -> ProcessTemplate:
    """Read the only container of `deployment`.

    mounts: volume name -> the folder that holds what the volume would. port: bind this one instead of the
    manifest's. secrets: name -> key -> value. Raises ClusterError for what has no meaning on this machine.
    """
    template = deployment["spec"]["template"]
    pod = template["spec"]
    where = f"{deployment['kind']} {deployment['metadata']['name']!r}"
    containers = pod["containers"]
    if len(containers) != 1 or pod.get("initContainers"):
        raise ClusterError(
            f"{where}: has {len(containers)} containers and {len(pod.get('initContainers', []))} init "
            "containers; the local world runs exactly one; remove the others from spec.template"
        )
    container = containers[0]
    _refuse(pod, REFUSED_IN_POD, where)
    _refuse(container, REFUSED_IN_CONTAINER, where)
    if "postStart" in container.get("lifecycle", {}):
        raise ClusterError(
            f"{where}: lifecycle.postStart is not available in the local world; run it beforehand"
        )
    command = (*container.get("command", HEADWAY_COMMAND), *container.get("args", ()))
    folders = _mount_folders(container, mounts, where)
    command = tuple(_inside(argument, folders) for argument in command)
    num_threads = _num_threads(container, command, where)
    values = {e["name"]: _environment_value(e, secrets, where) for e in container.get("env", ())}
    environment = {name: _inside(value, folders) for name, value in values.items() if value is not None}
    if num_threads is not None:
        environment = {"OMP_NUM_THREADS": str(num_threads)} | environment
        if not {"serve", "eval"}.isdisjoint(command) and not _has_flag(command, "--num-threads"):
            command = (*command, "--num-threads", str(num_threads))
    if port is not None:
        command = _with_port(command, port)
    startup = container.get("startupProbe")
    live = container.get("livenessProbe")
    return ProcessTemplate(
        digest=hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16],
        command=command,
        environment=environment,
        grace_seconds=float(pod.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)),
        ready=_probe(container.get("readinessProbe") or {}, "/ready", where),
        startup_seconds=_startup_seconds(startup, where),
        live=_probe(live, "/health", where) if live else None,
        own_folders=_own_folders(pod, container, mounts),
    )


def for_process(template: ProcessTemplate, name: str) -> ProcessTemplate:
    """The same for one of several processes: what each pod would have for itself, each of them has, too."""
    own = [(folder, f"{folder}/{name}") for folder in template.own_folders]
    return replace(
        template,
        command=tuple(_inside(argument, own) for argument in template.command),
        environment={key: _inside(value, own) for key, value in template.environment.items()},
        own_folders=tuple(folder for _, folder in own),
    )


def _own_folders(
    pod: Mapping[str, Any], container: Mapping[str, Any], mounts: Mapping[str, Path]
) -> tuple[str, ...]:
    """A path that exists here is as it is for any other process."""
    paths = {Path(mount["mountPath"]) for mount in container.get("volumeMounts", ())}
    empty = [volume["name"] for volume in pod.get("volumes", ()) if "emptyDir" in volume]
    return tuple(str(mounts[name]) for name in empty if name in mounts and mounts[name] not in paths)


def _refuse(manifest: Mapping[str, Any], remedies: Mapping[str, str], where: str) -> None:
    for field, remedy in remedies.items():
        if manifest.get(field):
            raise ClusterError(f"{where}: {field} is not available in the local world; {remedy}")


def _probe(manifest: Mapping[str, Any], default_path: str, where: str) -> Probe:
    if manifest and "httpGet" not in manifest:
        raise ClusterError(f"{where}: a probe without httpGet is not available in the local world")
    return Probe(
        path=manifest.get("httpGet", {}).get("path", default_path),
        period_seconds=float(manifest.get("periodSeconds", 10)),
        timeout_seconds=float(manifest.get("timeoutSeconds", 1)),
        failure_threshold=int(manifest.get("failureThreshold", 3)),
    )


def _startup_seconds(manifest: Mapping[str, Any] | None, where: str) -> float:
    if not manifest:
        return math.inf
    probe = _probe(manifest, "/ready", where)
    return float(manifest.get("initialDelaySeconds", 0)) + probe.period_seconds * probe.failure_threshold


def _mount_folders(
    container: Mapping[str, Any], mounts: Mapping[str, Path], where: str
) -> list[tuple[str, str]]:
    folders = []
    for mount in container.get("volumeMounts", ()):
        folder = mounts.get(mount["name"])
        if folder is None:
            raise ClusterError(
                f"{where}: volumeMounts names {mount['name']!r}, which is no volume of the pod"
            )
        if folder == Path(mount["mountPath"]):
            continue
        if "subPath" in mount:
            folder = folder / mount["subPath"]
        folders.append((mount["mountPath"].rstrip("/"), str(folder)))
    return sorted(folders, key=lambda pair: -len(pair[0]))  # the most specific first


def _inside(text: str, folders: list[tuple[str, str]]) -> str:
    """`/mount/x`, `--flag=/mount/x` or `file:///mount/x` with the folder that stands for the mount."""
    for mount_path, folder in folders:
        for prefix in ("", text.partition("=")[0] + "=", text.partition("://")[0] + "://"):
            path = text.removeprefix(prefix)
            if text.startswith(prefix) and (path == mount_path or path.startswith(mount_path + "/")):
                return prefix + folder + path.removeprefix(mount_path)
    return text


def _environment_value(variable: Mapping[str, Any], secrets: Secrets, where: str) -> str | None:
    """None: the variable is not to be set."""
    if "valueFrom" not in variable:
        return str(variable.get("value", ""))
    reference = variable["valueFrom"].get("secretKeyRef")
    if reference is None:
        source = min(variable["valueFrom"], default="nothing")
        raise ClusterError(
            f"{where}: env {variable['name']!r} takes its value from {source}, "
            "which the local world does not have; give a value"
        )
    value = secrets.get(reference["name"], {}).get(reference["key"])
    if value is None and not reference.get("optional"):
        raise ClusterError(
            f"{where}: env {variable['name']!r} wants the key {reference['key']!r} of the Secret "
            f"{reference['name']!r}, which is not there; put the Secret into the same file as the "
            "InferenceService, as a second document"
        )
    return None if value is None else value.decode()


def _num_threads(container: Mapping[str, Any], command: tuple[str, ...], where: str) -> int | None:
    """Of each of the engine's processes, which share the limit."""
    limit = container.get("resources", {}).get("limits", {}).get("cpu")
    if limit is None:
        return None
    try:
        return max(1, math.ceil(parse_quantity(limit)) // _num_ranks(command))
    except ValueError as error:
        raise ClusterError(f"{where}: resources.limits.cpu: {error}") from error


def _num_ranks(command: tuple[str, ...]) -> int:
    """What the engine itself refuses counts as one: it says why."""
    given = [
        command[index + 1] if argument in RANKS_FLAGS else argument.partition("=")[2]
        for index, argument in enumerate(command)
        if (argument in RANKS_FLAGS and index + 1 < len(command)) or argument.startswith(f"{RANKS_FLAGS[0]}=")
    ]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) else 1


def _has_flag(command: tuple[str, ...], flag: str) -> bool:
    return any(argument == flag or argument.startswith(flag + "=") for argument in command)


def _with_port(command: tuple[str, ...], port: int) -> tuple[str, ...]:
    kept: list[str] = []
    arguments = iter(command)
    for argument in arguments:
        if argument == "--port":
            next(arguments, None)
        elif not argument.startswith("--port="):
            kept.append(argument)
    return (*kept, "--port", str(port))
