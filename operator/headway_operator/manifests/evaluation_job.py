"""The Job that judges a model before it takes traffic: `headway eval` in a pod like a replica's.

Its pod is the replicas' own, user's template included: image, command, security, volumes, credentials and
node are those that will serve. Without what only a server needs: ports, probes, drain, keys of clients, other
containers (which would keep the Job from ending). Only labels differ that make a pod a replica.
"""

import dataclasses
import itertools
from typing import Any

from headway_operator import names
from headway_operator.manifests import pod
from headway_operator.manifests.metadata import metadata
from headway_operator.manifests.placement import with_gpus
from headway_operator.manifests.runtime_template import API_KEYS_VOLUME, runtime_template
from headway_operator.spec import Service
from headway_operator.spec.quality import Quality
from headway_operator.state import Manifest, Site

TERMINATION_LOG = "/dev/termination-log"
TEXT_VOLUME = "quality-text"
TASKS_VOLUME = "quality-tasks"
FILES_FOLDER = "/mnt/quality"
BASELINE_VOLUME, BASELINE_MOUNT = "quality-baseline", "/mnt/baseline-models"
# A verdict that the model failed is an end; not having come to one, as for want of a network, is tried again.
FAILED_STATUS = 1
MAX_RETRIES = 2
# Long enough to look at its log; what it came to stands in the service's status.
KEPT_SECONDS = 86_400
GRACE_SECONDS = 10
# Of a pod among others like it, and of one that never ends.
OF_REPLICAS = ("restartPolicy", "topologySpreadConstraints")
OF_A_SERVER = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
# What a replica is told that makes its answers what they are; the evaluation is told the same.
ENGINE_FLAGS = (
    *("--dtype", "--device", "--quantization", "--max-model-len", "--kv-cache-dtype"),
    *("--memory-check", "--speculative-config", "--tensor-parallel-size", "--weight-compression"),
)
SERVER_VOLUMES = frozenset((pod.ADMIN_VOLUME, API_KEYS_VOLUME))


def evaluation_job(service: Service, site: Site, image: str, name: str) -> Manifest:
    """The Job `name`; only for a service with spec.quality. Raises SpecError as the pod template does."""
    quality = service.spec.quality
    assert quality is not None, "nothing is judged without spec.quality"
    labels = names.component_labels(service.name, names.EVALUATION_COMPONENT)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(service, name, labels),
        "spec": {
            "backoffLimit": MAX_RETRIES,
            "activeDeadlineSeconds": quality.timeout_seconds,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": names.RUNTIME_CONTAINER,
                            "operator": "In",
                            "values": [FAILED_STATUS],
                        },
                    },
                    # A node that goes away is no attempt.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": _template(service, site, image, quality, labels),
        },
    }


def _template(
    service: Service, site: Site, image: str, quality: Quality, labels: dict[str, str]
) -> dict[str, Any]:
    # Adapters and kept prefixes are of servers: nothing is mounted for them.
    judged = service.spec.model_copy(update={"lora": None, "kv_offload": None})
    replica = runtime_template(dataclasses.replace(service, spec=judged), site, image)
    spec = {key: value for key, value in replica["spec"].items() if key not in OF_REPLICAS}
    runtime = next(one for one in spec["containers"] if one["name"] == names.RUNTIME_CONTAINER)
    container = {key: value for key, value in runtime.items() if key not in OF_A_SERVER}
    container["args"] = evaluation_arguments(quality, runtime["args"])
    container["terminationMessagePath"] = TERMINATION_LOG
    if quality.resources is not None:
        container["resources"] = with_gpus(quality.resources, service.spec, site)
    volumes, mounts = _volumes(quality)
    container["volumeMounts"] = _without_servers(container.get("volumeMounts") or []) + mounts
    return {
        "metadata": {
            **replica["metadata"],
            "labels": {**replica["metadata"]["labels"], **labels},
        },
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": [container],
            "volumes": _without_servers(spec.get("volumes") or []) + volumes,
        },
    }


def _without_servers(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["name"] not in SERVER_VOLUMES]


def evaluation_arguments(quality: Quality, serving: list[str]) -> list[str]:
    """The arguments of `headway eval`. serving: those of the replicas, whose engine is judged."""
    baseline = quality.baseline
    arguments = ["eval", serving[1]]
    if baseline.source is not None:
        arguments += ["--against", _inside(baseline.source, BASELINE_MOUNT, {"pvc"})]
    for flag, value in itertools.pairwise(serving):
        if flag in ENGINE_FLAGS:
            arguments += [flag, value]
    for name, value in baseline.model_dump(exclude={"source"}, exclude_none=True).items():
        arguments += [f"--baseline-{name.replace('_', '-')}", value]
    for flag, volume, file in _files(quality):
        arguments += [flag, _inside(file, f"{FILES_FOLDER}/{volume}", {"configmap", "pvc"})]
    if quality.max_tokens is not None:
        arguments += ["--max-tokens", str(quality.max_tokens)]
    for name, limit in quality.thresholds.given().items():
        arguments += [f"--{name.replace('_', '-')}", f"{limit.normalize():f}"]
    return [*arguments, "--verdict-file", TERMINATION_LOG]


def _files(quality: Quality) -> list[tuple[str, str, str]]:
    """Flag, name of the volume and file, of each that is given."""
    files = [] if quality.text is None else [("--text", TEXT_VOLUME, quality.text)]
    tasks = enumerate(quality.tasks or ())
    return files + [("--tasks", f"{TASKS_VOLUME}-{number}", one) for number, one in tasks]


def _volumes(quality: Quality) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of files that do not come with the container, and of a baseline on a claim."""
    wanted = [(volume, f"{FILES_FOLDER}/{volume}", file) for _, volume, file in _files(quality)]
    if quality.baseline.source is not None:
        wanted.append((BASELINE_VOLUME, BASELINE_MOUNT, quality.baseline.source))
    volumes, mounts = [], []
    for volume, folder, reference in wanted:
        scheme, name, path = _split(reference)
        if scheme == "configmap":
            source: dict[str, Any] = {"configMap": {"name": name, "items": [{"key": path, "path": path}]}}
        elif scheme == "pvc":
            source = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
        else:
            continue
        volumes.append({"name": volume, **source})
        mounts.append({"name": volume, "mountPath": folder, "readOnly": True})
    return volumes, mounts


def _inside(reference: str, folder: str, mounted: set[str]) -> str:
    """Where the container finds it: below `folder` what is mounted there, else as it is written."""
    scheme, _, path = _split(reference)
    return f"{folder}/{path}".rstrip("/") if scheme in mounted else reference


def _split(reference: str) -> tuple[str, str, str]:
    """Scheme, name and path of SCHEME://NAME/PATH; "" for what is written otherwise."""
    scheme, separator, rest = reference.partition("://")
    name, _, path = rest.partition("/")
    return (scheme, name, path.strip("/")) if separator else ("", "", "")
