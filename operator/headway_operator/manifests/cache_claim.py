"""The PersistentVolumeClaim of a ModelCache that names none that exists."""

from typing import Any

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.spec import ModelCache
from headway_operator.state import Manifest

DEFAULT_ACCESS_MODES = ["ReadWriteOnce"]


def claim_name(cache: ModelCache) -> str:
    """Of the claim onto which is fetched, whoever made it."""
    return cache.spec.storage.claim_name or names.cache_claim(cache.name)


def cache_claim(cache: ModelCache) -> Manifest | None:
    """NAME-model-cache, which goes with its ModelCache, or None where the claim is the user's."""
    storage = cache.spec.storage
    if storage.size is None:
        return None
    spec: dict[str, Any] = {
        "accessModes": storage.access_modes or DEFAULT_ACCESS_MODES,
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": names.CLAIM,
        "metadata": metadata(cache, claim_name(cache), names.cache_labels(cache.name)),
        "spec": spec,
    }
