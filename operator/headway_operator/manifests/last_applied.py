"""What was applied of a revision or a gateway, kept on the object itself. Pure.

An operator that renders an unchanged spec differently leaves such an object as it is, and so does one that
gave a rollout up: nobody then knows any more what others changed in it. So whoever applies one writes the
whole manifest into an annotation, compressed; it is on the object, not in its pod template, where it would
restart pods.

Whoever may edit the object may edit the annotation. It is of no use unless it is about this very object, of
this owner, and its pods are such as the template of a user may ask for.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests.operator_key import refuse_key_in
from headway_operator.manifests.restricted import faults
from headway_operator.manifests.template_shape import check_merged
from headway_operator.names import LAST_APPLIED_ANNOTATION, ServiceKey
from headway_operator.spec.quantity import parse_quantity
from headway_operator.state import Manifest

# Of the 256 KiB that the API server takes of all annotations of an object; and of what is read, decompressed.
MAX_CHARACTERS = 2**17
MAX_BYTES = 2**20
PARTS = {"apiVersion", "kind", "metadata", "spec"}
METADATA_PARTS = {"name", "namespace", "labels", "ownerReferences"}
# Lists to whose elements others may add some of their own. Of any other, the whole list is ours.
SHARED_LISTS = {
    *("containers", "initContainers", "ephemeralContainers", "volumes", "env", "ports", "volumeMounts"),
    *("volumeDevices", "hostAliases", "imagePullSecrets", "resourceClaims", "schedulingGates"),
    *("topologySpreadConstraints", "ownerReferences"),
}
QUANTITIES = ("limits", "requests")
_QUANTITY = "sizeLimit"


def with_last_applied(manifest: Manifest) -> Manifest:
    """The manifest with itself in the annotation; without, where it is so large that it might be refused."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > MAX_CHARACTERS:
        return manifest
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), LAST_APPLIED_ANNOTATION: packed}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def last_applied(found: Manifest, key: ServiceKey, uid: str, *, allows_unrestricted: bool) -> Manifest | None:
    """What was applied of an object of the service `key`, whose uid this is; None without the annotation.

    Raises ValueError where the annotation is of no use, with the reason.
    """
    packed = (found["metadata"].get("annotations") or {}).get(LAST_APPLIED_ANNOTATION)
    if packed is None:
        return None
    applied = _unpacked(packed)
    try:
        _check_identity(applied, found, key, uid)
        _check_templates(applied, key, allows_unrestricted=allows_unrestricted)
    except SpecError as error:
        raise ValueError(f"its annotation {LAST_APPLIED_ANNOTATION} cannot be used: {error}") from error
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its annotation {LAST_APPLIED_ANNOTATION} is none of ours: {error!r}") from error
    return applied


def holds(found: Any, applied: Any, field: str = "") -> bool:
    """Whether all that was applied is there as it was; what is there beside it does not count.

    What the API server writes otherwise than it was given may count as a change: applied again, it is none.
    """
    if isinstance(applied, dict):
        return isinstance(found, dict) and all(
            name in found and holds(found[name], value, _QUANTITY if field in QUANTITIES else name)
            for name, value in applied.items()
            if value is not None
        )
    if isinstance(applied, list):
        if not isinstance(found, list):
            return False
        if field in SHARED_LISTS:
            return all(any(holds(other, one) for other in found) for one in applied)
        return len(found) == len(applied) and all(map(holds, found, applied))
    if field == _QUANTITY:
        return bool(_quantity(found) == _quantity(applied))
    return type(found) is type(applied) and bool(found == applied)


def _quantity(value: Any) -> Any:
    try:
        return parse_quantity(value)
    except ValueError:
        return value


def _unpacked(packed: str) -> Manifest:
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(packed, validate=True), MAX_BYTES)
        applied = json.loads(text)
    except (ValueError, zlib.error, RecursionError) as error:
        raise ValueError(f"its annotation {LAST_APPLIED_ANNOTATION} cannot be read: {error}") from error
    if not isinstance(applied, dict):
        raise ValueError(f"its annotation {LAST_APPLIED_ANNOTATION} holds no object")
    return applied


def _check_identity(applied: Manifest, found: Manifest, key: ServiceKey, uid: str) -> None:
    """Raises SpecError where it is about another object, or about more than is applied of one."""
    metadata = applied["metadata"]
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": key.name, "uid": uid}
    labels = _labels(key, str(found["metadata"]["name"]))
    is_whole = set(applied) == PARTS and set(metadata) == METADATA_PARTS
    if not is_whole or "replicas" in applied["spec"]:
        raise SpecError("metadata", "other fields than are ever applied")
    for where, value, want in (
        ("apiVersion", applied["apiVersion"], found["apiVersion"]),
        ("kind", applied["kind"], found["kind"]),
        ("metadata.name", metadata["name"], found["metadata"]["name"]),
        ("metadata.namespace", metadata["namespace"], found["metadata"]["namespace"]),
        ("metadata.ownerReferences", metadata["ownerReferences"], [{**owner, "controller": True}]),
        ("metadata.labels", {**metadata["labels"], **labels}, metadata["labels"]),
    ):
        if value != want:
            raise SpecError(where, f"{value!r} is not that of the object: {want!r}")


def _labels(key: ServiceKey, name: str) -> Mapping[str, str]:
    """Those by which the object is known as the service's."""
    if name == names.gateway(key.name):
        return names.component_labels(key.name, names.GATEWAY_COMPONENT)
    labels = names.component_labels(key.name, names.RUNTIME_COMPONENT)
    return {**labels, names.REVISION_LABEL: name.removeprefix(names.revision(key.name, ""))}


def _check_templates(applied: Manifest, key: ServiceKey, *, allows_unrestricted: bool) -> None:
    """Raises SpecError for pods that a user's template may not ask for."""
    is_gateway = applied["metadata"]["name"] == names.gateway(key.name)
    for path, template in _templates(applied):
        check_merged(template, path)
        refuse_key_in(template, path)
        found = faults(template, names.gateway(key.name) if is_gateway else None)
        if found and not allows_unrestricted:
            raise SpecError(f"{path}.{found[0][0]}", "is not allowed in pods that the operator makes")


def _templates(applied: Manifest) -> list[tuple[str, Any]]:
    spec = applied["spec"]
    if applied["kind"] == names.LEADER_WORKER_SET:
        groups = spec["leaderWorkerTemplate"]
        parts = ("leaderTemplate", "workerTemplate")
        return [(f"spec.leaderWorkerTemplate.{part}", groups[part]) for part in parts]
    return [("spec.template", spec["template"])]
