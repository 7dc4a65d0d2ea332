"""On which nodes replicas and gateways run, and with which GPUs: what `scheduling` and `gpu` write."""

from typing import Any

from headway_operator import names
from headway_operator.spec import GPU_RESOURCE, InferenceServiceSpec, Service
from headway_operator.spec.resources import Resources
from headway_operator.spec.scheduling import Scheduling, TopologySpread
from headway_operator.state import Site

HOSTNAME_LABEL = "kubernetes.io/hostname"
# As a Deployment labels the pods of each of its templates.
TEMPLATE_LABEL = "pod-template-hash"


def placement(service: Service, site: Site) -> dict[str, Any]:
    """Fields of a pod's spec; none where nothing is said, and none in the local world."""
    if site.kind != "kubernetes":
        return {}
    # Each revision is spread by itself: replicas of an older one, which leave, count for nothing.
    selector = names.component_selector(service.name, names.RUNTIME_COMPONENT)
    fields = _fields(service.spec.scheduling, selector, names.REVISION_LABEL)
    return _written({**fields, "nodeSelector": _node_selector(service.spec)})


def gateway_placement(service: Service, site: Site) -> dict[str, Any]:
    """The same of gateways, which are spread over nodes as far as there are some, unless told how."""
    if site.kind != "kubernetes":
        return {}
    told = service.spec.gateway.scheduling
    constraints = [] if told is None else told.topology_spread_constraints
    # Those of one template, since the others leave.
    selector = names.component_selector(service.name, names.GATEWAY_COMPONENT)
    fields = _fields(told, selector, TEMPLATE_LABEL)
    if all(one.topology_key != HOSTNAME_LABEL for one in constraints):
        spread = _spread(TopologySpread(topology_key=HOSTNAME_LABEL), selector, TEMPLATE_LABEL)
        fields["topologySpreadConstraints"] = [*fields.get("topologySpreadConstraints", []), spread]
    return _written(fields)


def _fields(told: Scheduling | None, selector: dict[str, str], template_label: str) -> dict[str, Any]:
    if told is None:
        return {}
    tolerations = [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in told.tolerations]
    spreads = [_spread(one, selector, template_label) for one in told.topology_spread_constraints]
    return {
        "nodeSelector": told.node_selector,
        "tolerations": tolerations,
        "topologySpreadConstraints": spreads,
        "priorityClassName": told.priority_class_name,
    }


def _written(fields: dict[str, Any]) -> dict[str, Any]:
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


def _spread(told: TopologySpread, selector: dict[str, str], template_label: str) -> dict[str, Any]:
    """Of pods that have the same value of `template_label` alone."""
    return {
        **told.model_dump(mode="json", by_alias=True, exclude_none=True),
        "labelSelector": {"matchLabels": selector},
        "matchLabelKeys": [template_label],
    }
