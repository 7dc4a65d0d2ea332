"""The NetworkPolicy around the pods that fetch: nobody reaches them, and they reach what the source needs."""

from headway_operator import names
from headway_operator.manifests.metadata import metadata
from headway_operator.manifests.network_policy import egress_of
from headway_operator.spec import ModelCache
from headway_operator.state import Manifest


def fetch_policy(cache: ModelCache) -> Manifest | None:
    """NAME-fetch, or None where there is to be none."""
    if not cache.spec.network_policy.enabled:
        return None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(cache, names.fetch_policy(cache.name), names.cache_labels(cache.name)),
        "spec": {
            "podSelector": {"matchLabels": names.fetch_selector(cache.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress_of([cache.spec.source]),
        },
    }
