"""Names what is judged by a hash of what the user wrote, the image that runs it, and the files it is given.

What changes no answer is not in it: batch limits, replicas, targets, keys, drain time, labels, resources,
what is done where memory may not do, where prefixes are kept, bits of weights that nothing is lost by, how it
is rolled out; nor adapters, which are not judged. Fields that a later version adds are, until somebody says
otherwise: judging once too often is the smaller fault. What a newer operator renders differently is not
either, so that an upgrade judges nothing anew.
"""

from collections.abc import Mapping
from typing import Any

from headway_operator.manifests.render import content_hash
from headway_operator.spec import InferenceServiceSpec
from headway_operator.spec.safeguards import SAFEGUARDS

NOT_JUDGED: dict[str, Any] = {
    **dict.fromkeys(("slo", "replicas", "scaling", "batching", "kv_cache_memory", "resources"), True),
    **dict.fromkeys(("auth", "drain_timeout_seconds", "lora"), True),
    **dict.fromkeys(("prefix_caching", "kv_offload", "weight_compression", "memory_check"), True),
    **dict.fromkeys(("rollout", "gateway", "waiting", "suspend"), True),
    "model": {"served_name", "credentials_secret_ref"},
    "quality": {"timeout_seconds", "resources"},
    "template": {"metadata"},
    "gpu": {"count"},
    **dict.fromkeys(("scheduling", *SAFEGUARDS), True),
}
# Levers of which none is pulled: the model is its own baseline, to the letter. With "auto", quantization and
# the KV cache's type are what the checkpoint asks for, which is not known here; what a model that computes in
# another dtype loses by a bfloat16 cache is taken for nothing.
NO_LEVER = {"quantization": "none", "kv_cache_dtype": "bfloat16", "dtype": "auto", "speculative": None}


def judged_hash(spec: InferenceServiceSpec, image: str, digests: Mapping[str, str]) -> str:
    """digests: of the files that are given, by the names that the spec has for them."""
    judged = spec.model_dump(mode="json", by_alias=True, exclude=NOT_JUDGED, exclude_defaults=True)
    return content_hash({"spec": judged, "image": image, "files": dict(digests)})


def has_nothing_to_judge(spec: InferenceServiceSpec) -> bool:
    """Whether the model is held against itself: a plain checkpoint, no lever, no other baseline."""
    is_own_baseline = spec.quality is not None and not spec.quality.baseline.model_dump(exclude_defaults=True)
    return is_own_baseline and all(getattr(spec, name) == value for name, value in NO_LEVER.items())
