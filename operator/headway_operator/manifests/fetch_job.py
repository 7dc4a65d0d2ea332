"""The Job that fetches what a ModelCache asks for onto its claim: `headway fetch` in a restricted pod.

An attempt that ends goes on where the one before it stopped; attempts follow each other with pauses that
double, from ten seconds up to six minutes (Kubernetes' own), as often as MAX_RETRIES says. What the command
line or the model is at fault for is not tried again by this Job. The files belong to nobody in particular and
everybody may read them, so that replicas under any user do.
"""

from typing import Any

from headway_operator import names
from headway_operator.manifests import pod
from headway_operator.manifests.metadata import metadata
from headway_operator.manifests.model_source import (
    LOGIN_FOLDER,
    LOGIN_VOLUME,
    login_volume,
    secret_variables,
)
from headway_operator.manifests.operator_key import refuse_key
from headway_operator.manifests.user_template import REPLICAS, with_template
from headway_operator.spec import ModelCache
from headway_operator.state import Manifest, Site

TERMINATION_LOG = "/dev/termination-log"
CLAIM_VOLUME, CLAIM_MOUNT = "model-cache", "/mnt/model-cache"
PROGRESS_SECONDS = 5
# Exit statuses are those of `headway fetch` (docs/contract.md): nothing but a change of the spec would help.
FINAL_STATUS = 2
MAX_RETRIES = 6
# Long enough to look at its log; what was fetched stands in the ModelCache's status.
KEPT_SECONDS = 86_400
GRACE_SECONDS = 10
# The group that owns a volume which was just made, so that the image's user can write it.
VOLUME_SECURITY = {"fsGroup": 65532, "fsGroupChangePolicy": "OnRootMismatch"}


def fetch_job(cache: ModelCache, site: Site, claim_name: str, name: str) -> Manifest:
    """The Job `name`. Raises SpecError as the pod template of a replica does."""
    labels = {**names.cache_labels(cache.name), **names.fetch_selector(cache.name)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(cache, name, labels),
        "spec": {
            "backoffLimit": MAX_RETRIES,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": names.RUNTIME_CONTAINER,
                            "operator": "In",
                            "values": [FINAL_STATUS],
                        },
                    },
                    # A node that goes away is no attempt.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": _template(cache, site, claim_name, labels),
        },
    }


def _template(cache: ModelCache, site: Site, claim_name: str, labels: dict[str, str]) -> dict[str, Any]:
    spec = cache.spec
    volumes: list[dict[str, Any]] = [
        {"name": pod.TEMPORARY_VOLUME, "emptyDir": {}},
        {"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": claim_name}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": pod.TEMPORARY_VOLUME, "mountPath": pod.TEMPORARY_PATH},
        {"name": CLAIM_VOLUME, "mountPath": CLAIM_MOUNT},
    ]
    environment: list[dict[str, Any]] = [{"name": "HOME", "value": pod.TEMPORARY_PATH}]
    if spec.credentials_secret_ref is not None:
        refuse_key("spec.credentialsSecretRef.name", spec.credentials_secret_ref.name)
        environment += secret_variables(spec.credentials_secret_ref.name, [spec.scheme])
        if spec.scheme == "oci":
            volumes.append(login_volume(spec.credentials_secret_ref.name))
            mounts.append({"name": LOGIN_VOLUME, "mountPath": LOGIN_FOLDER, "readOnly": True})
    container: dict[str, Any] = {
        "name": names.RUNTIME_CONTAINER,
        "args": fetch_arguments(cache),
        "env": environment,
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": pod.TERMINATION_MESSAGE_POLICY,
        "securityContext": pod.CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    if resources := spec.resources.model_dump(mode="json", by_alias=True, exclude_defaults=True):
        container["resources"] = resources
    ours = {
        "metadata": {"labels": labels},
        "spec": {
            **_placement(cache),
            **pod.image_pull_secrets(site),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "securityContext": {**pod.POD_SECURITY, **VOLUME_SECURITY},
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": [pod.with_image(container, site.runtime_image)],
            "volumes": volumes,
        },
    }
    return ours if spec.template is None else with_template(ours, spec.template, site, REPLICAS)


def fetch_arguments(cache: ModelCache) -> list[str]:
    """The arguments of `headway fetch`."""
    arguments = ["fetch", cache.spec.revised_source, "--download-dir", CLAIM_MOUNT]
    arguments += ["--result-file", TERMINATION_LOG, "--progress-seconds", str(PROGRESS_SECONDS)]
    return arguments + (["--adapter"] if cache.spec.adapter else [])


def _placement(cache: ModelCache) -> dict[str, Any]:
    if (told := cache.spec.scheduling) is None:
        return {}
    fields: dict[str, Any] = {
        "nodeSelector": told.node_selector,
        "tolerations": [
            one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in told.tolerations
        ],
        "priorityClassName": told.priority_class_name,
    }
    return {name: value for name, value in fields.items() if value}
