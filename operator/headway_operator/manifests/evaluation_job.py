"""The Job that judges a model before it takes traffic: `headway eval` in a pod like a replica's.

Its pod is the replicas' own, user's template included: image, command, security, volumes, credentials and
node are those that will serve. Without what only a server needs: ports, probes, drain, keys of clients, other
containers (which would keep the Job from ending). Only labels differ that make a pod a replica.
"""

from typing import Any

from headway_operator import names
from headway_operator.manifests import model_source, pod
from headway_operator.manifests.metadata import metadata
from headway_operator.manifests.runtime_template import (
    API_KEYS_VOLUME,
    runtime_template,
    speculative_config,
)
from headway_operator.spec import Quality, Service
from headway_operator.spec.source import scheme_of
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
OF_A_SERVER = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
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
    replica = runtime_template(service, site, image)
    spec = {key: value for key, value in replica["spec"].items() if key != "restartPolicy"}
    runtime = next(one for one in spec["containers"] if one["name"] == names.RUNTIME_CONTAINER)
    container = {key: value for key, value in runtime.items() if key not in OF_A_SERVER}
    container["args"] = evaluation_arguments(service, quality)
    container["terminationMessagePath"] = TERMINATION_LOG
    if quality.resources is not None:
        resources = quality.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        container["resources"] = resources
    volumes, mounts = _files(quality)
    container["volumeMounts"] = _without_servers(container.get("volumeMounts") or [], "name") + mounts
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
            "volumes": _without_servers(spec.get("volumes") or [], "name") + volumes,
        },
    }


def _without_servers(entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry[key] not in SERVER_VOLUMES]


def evaluation_arguments(service: Service, quality: Quality) -> list[str]:
    """The arguments of `headway eval`."""
    spec, baseline = service.spec, quality.baseline
    arguments = ["eval", model_source.served_source(spec, spec.model.source)]
    if baseline.source is not None:
        arguments += ["--against", _baseline_source(service, baseline.source)]
    arguments += ["--dtype", spec.dtype, "--device", spec.device]
    if spec.quantization != "auto":
        arguments += ["--quantization", spec.quantization]
    if spec.model.max_model_len is not None:
        arguments += ["--max-model-len", str(spec.model.max_model_len)]
    if spec.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", spec.kv_cache_dtype]
    if spec.speculative is not None:
        arguments += ["--speculative-config", speculative_config(spec, spec.speculative)]
    for name, value in baseline.model_dump(exclude={"source"}, exclude_none=True).items():
        arguments += [f"--baseline-{name.replace('_', '-')}", value]
    if quality.text is not None:
        arguments += ["--text", _path(quality.text, TEXT_VOLUME)]
    for number, tasks in enumerate(quality.tasks or ()):
        arguments += ["--tasks", _path(tasks, f"{TASKS_VOLUME}-{number}")]
    if quality.max_tokens is not None:
        arguments += ["--max-tokens", str(quality.max_tokens)]
    for name, limit in quality.thresholds.given().items():
        arguments += [f"--{name.replace('_', '-')}", f"{limit.normalize():f}"]
    return [*arguments, "--verdict-file", TERMINATION_LOG]


def _baseline_source(service: Service, source: str) -> str:
    if scheme_of(source) != "pvc":
        return source
    _, path = model_source.claim_and_path(source)
    return f"{BASELINE_MOUNT}/{path}".rstrip("/")


def _path(material: str, volume: str) -> str:
    """Where the container sees one file that it is given."""
    _, separator, rest = material.partition("://")
    if not separator:  # a path already, bundled or none
        return material
    return f"{FILES_FOLDER}/{volume}/{rest.partition('/')[2].strip('/')}"


def _files(quality: Quality) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of the files, and of a baseline on a claim."""
    given = [(TEXT_VOLUME, quality.text)]
    given += [(f"{TASKS_VOLUME}-{number}", one) for number, one in enumerate(quality.tasks or ())]
    volumes, mounts = [], []
    for volume, material in given:
        scheme, separator, rest = (material or "").partition("://")
        if not separator:
            continue
        name, _, path = rest.partition("/")
        if scheme == "configmap":
            source: dict[str, Any] = {"configMap": {"name": name, "items": [{"key": path, "path": path}]}}
        else:
            source = _claim(name)
        volumes.append({"name": volume, **source})
        mounts.append({"name": volume, "mountPath": f"{FILES_FOLDER}/{volume}", "readOnly": True})
    baseline = quality.baseline.source
    if baseline is not None and scheme_of(baseline) == "pvc":
        volumes.append({"name": BASELINE_VOLUME, **_claim(model_source.claim_and_path(baseline)[0])})
        mounts.append({"name": BASELINE_VOLUME, "mountPath": BASELINE_MOUNT, "readOnly": True})
    return volumes, mounts


def _claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
