"""On which nodes replicas run, and with which GPUs: what `spec.scheduling` and `spec.gpu` write in a pod."""

from typing import Any

from headway_operator import names
from headway_operator.spec import GPU_RESOURCE, InferenceServiceSpec, Service
from headway_operator.spec.resources import Resources
from headway_operator.spec.scheduling import TopologySpread
from headway_operator.state import Site


def placement(service: Service, site: Site) -> dict[str, Any]:
    """Fields of a pod's spec; none where nothing is said, and none in the local world."""
    if site.kind != "kubernetes":
        return {}
    spec = service.spec
    fields: dict[str, Any] = {"nodeSelector": _node_selector(spec)}
    if (told := spec.scheduling) is not None:
        fields["tolerations"] = [
            one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in told.tolerations
        ]
        fields["topologySpreadConstraints"] = [
            _spread(service, one) for one in told.topology_spread_constraints
        ]
        fields["priorityClassName"] = told.priority_class_name
    return {name: value for name, value in fields.items() if value}


def with_gpus(told: Resources, spec: InferenceServiceSpec, site: Site) -> dict[str, Any]:
    """What the user says; and GPUs, where they are sure to be wanted and not said."""
    resources: dict[str, Any] = told.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    name, count = _gpus(spec)
    if site.kind != "kubernetes" or not count or name in {*told.limits, *told.requests}:
        return resources
    if told.claims and spec.gpu is None:
        return resources
    return {**resources, "limits": {**resources.get("limits", {}), name: str(count)}}


def _gpus(spec: InferenceServiceSpec) -> tuple[str, int]:
    """The resource and how many in each pod; 0 where it is not sure that any are wanted."""
    size = spec.tensor_parallel_size // spec.nodes_per_replica
    if spec.gpu is not None:
        return spec.gpu.resource_name, spec.gpu.count or size
    are_wanted = spec.tensor_parallel_size > 1 and spec.device == "cuda"
    return GPU_RESOURCE, size if are_wanted else 0


def _node_selector(spec: InferenceServiceSpec) -> dict[str, str]:
    selector = {} if spec.scheduling is None else dict(spec.scheduling.node_selector)
    if spec.gpu is not None and spec.gpu.product is not None:
        selector[spec.gpu.product_label] = spec.gpu.product
    return selector


def _spread(service: Service, told: TopologySpread) -> dict[str, Any]:
    """Each revision is spread by itself: replicas of an older one, which leave, count for nothing."""
    return {
        **told.model_dump(mode="json", by_alias=True, exclude_none=True),
        "labelSelector": {"matchLabels": names.component_selector(service.name, names.RUNTIME_COMPONENT)},
        "matchLabelKeys": [names.REVISION_LABEL],
    }
