"""What a user may ask for: the models of an InferenceService and the frozen `Service` made from a manifest.

`fields` is the source from which the CRD is generated, `status_fields` that of the status, `service` turns a
manifest into a `Service` or a `SpecError`, `quantity` reads Kubernetes quantities. Knows nothing of clusters.
"""

from headway_operator.spec.cache import ModelCache, parse_cache
from headway_operator.spec.fields import InferenceServiceSpec, KVOffload
from headway_operator.spec.lora import Lora
from headway_operator.spec.model_cache import ModelCacheSpec
from headway_operator.spec.model_cache_status import ModelCacheStatus
from headway_operator.spec.quantity import parse_quantity
from headway_operator.spec.resources import GPU_RESOURCE
from headway_operator.spec.service import Manifest, Service, generation_of, key_of, parse
from headway_operator.spec.speculative import Speculative
from headway_operator.spec.status_fields import InferenceServiceStatus

__all__ = [
    "GPU_RESOURCE",
    "InferenceServiceSpec",
    "InferenceServiceStatus",
    "KVOffload",
    "Lora",
    "Manifest",
    "ModelCache",
    "ModelCacheSpec",
    "ModelCacheStatus",
    "Service",
    "Speculative",
    "generation_of",
    "key_of",
    "parse",
    "parse_cache",
    "parse_quantity",
]
