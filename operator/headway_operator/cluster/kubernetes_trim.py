"""What is kept in memory of each object: what somebody reads. Pure, but for what it keeps of words.

Three thousand pods as they are would be some hundred MiB; without managed fields, volumes and environments
they are a tenth of it. Who reads a further field adds it here. Names and words that many objects have in
common are in memory once.
"""

from collections.abc import Mapping
from typing import Any

from headway_operator.names import (
    API_VERSION,
    CACHE_KIND,
    DELETION_COST_ANNOTATION,
    KIND,
    MONITORING_KINDS,
    OPERATOR_UNTIL_ANNOTATION,
)

Json = dict[str, Any]
# Of these only owner and name matter, and who wrote a checkpoint; they are asked for as bare metadata.
METADATA_KINDS = frozenset(
    (
        *("Service", "ServiceAccount", "ConfigMap", "Role", "RoleBinding"),
        *("PodDisruptionBudget", "NetworkPolicy", *MONITORING_KINDS),
    )
)
METADATA = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "labels", "ownerReferences"),
    *("creationTimestamp", "deletionTimestamp"),
)
CONTAINER = ("name", "resources")
# Longer strings, and numbers of them, are hardly ever the same ones.
WORD_CHARACTERS = 40
MOST_WORDS = 20_000
_words: dict[str, str] = {}


def trim(kind: str, item: Mapping[str, Any]) -> Json:
    """The object without what nobody reads."""
    kept: Json = _in_known_words(_kept(kind, item))
    return kept


def _in_known_words(value: Any) -> Any:
    if isinstance(value, str):
        return _known(value)
    if isinstance(value, Mapping):
        return {_known(name): _in_known_words(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_known_words(one) for one in value]
    return value


def _known(word: str) -> str:
    """The same string, as another object has it already."""
    if len(word) > WORD_CHARACTERS:
        return word
    if len(_words) >= MOST_WORDS:
        _words.clear()
    return _words.setdefault(word, word)


def _kept(kind: str, item: Mapping[str, Any]) -> Json:
    metadata = item["metadata"]
    if kind in (KIND, CACHE_KIND):
        whole = {name: value for name, value in metadata.items() if name != "managedFields"}
        # In a list, items need not say what they are.
        return {"apiVersion": API_VERSION, "kind": kind, **item, "metadata": whole}
    kept: Json = {"metadata": _only(metadata, METADATA)}
    annotations = metadata.get("annotations") or {}
    if kind in METADATA_KINDS:
        if kind == "ConfigMap" and OPERATOR_UNTIL_ANNOTATION in annotations:
            kept["metadata"]["annotations"] = _only(annotations, (OPERATOR_UNTIL_ANNOTATION,))
        return kept
    spec, status = item.get("spec") or {}, item.get("status") or {}
    if kind == "Pod":
        kept["metadata"]["annotations"] = _only(annotations, (DELETION_COST_ANNOTATION,))
        kept["spec"] = _only(spec, ("nodeName",)) | {
            name: [_only(container, CONTAINER) for container in spec[name]]
            for name in ("containers", "initContainers")
            if spec.get(name)
        }
        kept["status"] = status
    elif kind == "HorizontalPodAutoscaler":
        kept["spec"] = _only(spec, ("scaleTargetRef",))
    else:
        kept["spec"] = {name: value for name, value in spec.items() if name != "template"}
        kept["status"] = status
    return kept


def _only(mapping: Mapping[str, Any], names: tuple[str, ...]) -> Json:
    return {name: mapping[name] for name in names if name in mapping}
