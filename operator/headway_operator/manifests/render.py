"""All children of a service, and the pin that keeps an operator upgrade from restarting any pod.

The algorithm:

1. `spec_hash` covers what the user wrote that shapes a template (defaults left out, so that a field added by
   a newer operator changes nothing). SLO, quality, replicas, scaling, rollout, waiting, suspend, the lower
   ends of batching and what stands around the pods are not in it. What shapes the gateway's template alone
   (`spec.gateway`, but for its replicas) has a hash of its own: changing it restarts no replica.
2. While `spec_hash` equals the pinned one in `status.revision`, the images pinned there are used instead of
   the site's. Otherwise a new revision is made with the site's images.
3. A template is rendered and hashed. If a newer operator renders an unchanged spec differently, the hash is
   not the pinned one: then the Deployment is kept as it is and not applied, as long as it exists.
4. How long pods have to finish their requests follows from the promises (`spec/drain.py`) when a revision is
   made, and is pinned with it: editing an SLO restarts nothing.
5. A gateway that is made anew has the site's image, as a new revision has: flags are rendered for that one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests.config_map import admin_config_map
from headway_operator.manifests.disruption_budget import (
    disruption_budget,
    gateway_disruption_budget,
)
from headway_operator.manifests.gateway_deployment import gateway_deployment
from headway_operator.manifests.gateway_template import gateway_template
from headway_operator.manifests.network_policy import network_policy
from headway_operator.manifests.pod_monitor import pod_monitor
from headway_operator.manifests.prometheus_rule import prometheus_rule
from headway_operator.manifests.role import gateway_role
from headway_operator.manifests.role_binding import gateway_role_binding
from headway_operator.manifests.runtime_deployment import runtime_deployment
from headway_operator.manifests.runtime_leader_worker_set import runtime_leader_worker_set
from headway_operator.manifests.runtime_template import image_of, runtime_template
from headway_operator.manifests.service import client_service, replicas_service
from headway_operator.manifests.service_account import gateway_service_account
from headway_operator.spec import InferenceServiceSpec, Service
from headway_operator.spec.drain import drain_seconds
from headway_operator.spec.safeguards import SAFEGUARDS
from headway_operator.state import ChildKey, Manifest, Rendered, RevisionPin, Site

# The default of sequences was once this on all devices: an API server keeps the defaults of its time in what
# it stores, and a hash that had it would roll those services.
UNHASHED_NUM_SEQS = 64
# Parts of the spec that never reach a template, beside the lower ends of batching.
LIVE_FIELDS = {"slo", "replicas", "scaling", "quality", "rollout", "gateway", "waiting", "suspend"}


def render(service: Service, site: Site, public_key_pem: str, existing: frozenset[ChildKey]) -> Rendered:
    """Every child of `service`.

    Raises SpecError for a template that cannot be merged, and for replicas that this place cannot have.
    """
    _check_nodes(service.spec, site)
    spec_hash = hash_spec(service.spec)
    pin = pin_of(service.status)
    if pin is not None and pin.spec_hash != spec_hash:
        pin = None
    drain = _drain_seconds(service.spec, pin)
    service = replace(service, spec=service.spec.model_copy(update={"drain_timeout_seconds": drain}))
    runtime_image = pin.runtime_image if pin else site.runtime_image
    runtime = runtime_template(service, site, runtime_image)
    runtime_hash = content_hash(runtime)
    gateway = _gateway(service, site, pin, existing)

    manifests: list[Manifest] = [
        admin_config_map(service, public_key_pem),
        gateway_service_account(service),
        gateway_role(service),
        gateway_role_binding(service),
        replicas_service(service),
        client_service(service),
        *_safeguards(service, site),
    ]
    keep = {ChildKey("ConfigMap", names.memory_config_map(service.name))}
    if gateway.template is None:
        keep.add(ChildKey("Deployment", names.gateway(service.name)))
    else:
        manifests.append(gateway_deployment(service, gateway.template))
    pinned = names.revision_children(pin.name) & existing if pin else frozenset()
    if pin and pin.hash != runtime_hash and pinned:
        runtime_hash, runtime_image = pin.hash, pin.runtime_image
        keep |= pinned
    else:
        runtime_image = image_of(runtime)
        spans_nodes = service.spec.nodes_per_replica > 1
        make = runtime_leader_worker_set if spans_nodes else runtime_deployment
        manifests.append(make(service, runtime, runtime_hash))
    revision = RevisionPin(
        name=names.revision(service.name, runtime_hash),
        hash=runtime_hash,
        runtime_image=runtime_image,
        gateway_image=gateway.image,
        gateway_hash=gateway.hash,
        spec_hash=spec_hash,
        gateway_spec_hash=gateway.spec_hash,
        drain_timeout_seconds=drain,
    )
    keep |= {ChildKey(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    return Rendered(revision, tuple(manifests), frozenset(keep))


def _drain_seconds(spec: InferenceServiceSpec, pin: RevisionPin | None) -> int:
    if pin is None:
        return drain_seconds(spec)
    return pin.drain_timeout_seconds or spec.drain_timeout_seconds


@dataclass(frozen=True, slots=True)
class _Gateway:
    """What becomes of the gateway's Deployment. template: None where it stays as it is."""

    template: dict[str, Any] | None
    image: str
    hash: str
    spec_hash: str


def _gateway(
    service: Service, site: Site, pin: RevisionPin | None, existing: frozenset[ChildKey]
) -> _Gateway:
    spec_hash = hash_gateway_spec(service.spec)
    if pin is not None and pin.gateway_spec_hash == spec_hash:
        template = gateway_template(service, site, pin.gateway_image)
        if content_hash(template) == pin.gateway_hash:
            return _Gateway(template, pin.gateway_image, pin.gateway_hash, spec_hash)
        if ChildKey("Deployment", names.gateway(service.name)) in existing:
            return _Gateway(None, pin.gateway_image, pin.gateway_hash, spec_hash)
    template = gateway_template(service, site, site.gateway_image)
    return _Gateway(template, site.gateway_image, content_hash(template), spec_hash)


def _check_nodes(spec: InferenceServiceSpec, site: Site) -> None:
    """Pods in groups are made by LeaderWorkerSet alone, and one machine is one node."""
    if spec.nodes_per_replica == 1 or names.LEADER_WORKER_SET in site.optional_kinds:
        return
    field, told = "spec.nodesPerReplica", f"{spec.nodes_per_replica}"
    if site.kind == "local":
        raise SpecError(field, f"{told}: this machine is one node; remove nodesPerReplica")
    raise SpecError(
        field,
        f"{told}: the cluster has no kind LeaderWorkerSet, or the operator no right to it; install "
        "LeaderWorkerSet (https://lws.sigs.k8s.io), upgrade Headway's chart, or remove nodesPerReplica",
        reason="LeaderWorkerSetMissing",
    )


def _safeguards(service: Service, site: Site) -> list[Manifest]:
    """What stands around the pods in a cluster; without pods there is nothing to stand around."""
    if site.kind != "kubernetes":
        return []
    wanted = (
        disruption_budget(service),
        gateway_disruption_budget(service),
        network_policy(service, site),
        pod_monitor(service, site),
        prometheus_rule(service, site),
    )
    return [manifest for manifest in wanted if manifest is not None]


def hash_spec(spec: InferenceServiceSpec) -> str:
    """Hash of what the user wrote that shapes a template."""
    seqs, tokens = spec.batching.max_num_seqs, spec.batching.max_num_batched_tokens
    # Put back to their defaults, which are left out, so that writing a lower end changes nothing.
    most = spec.highest_limits[0]
    batching = spec.batching.model_copy(
        update={
            "max_num_seqs": seqs.model_copy(
                update={"min": type(seqs)().min, "max": None if most == UNHASHED_NUM_SEQS else most}
            ),
            "max_num_batched_tokens": tokens.model_copy(update={"min": type(tokens)().min}),
        }
    )
    shaping = spec.model_copy(update={"batching": batching})
    return content_hash(
        shaping.model_dump(
            mode="json", by_alias=True, exclude={*LIVE_FIELDS, *SAFEGUARDS}, exclude_defaults=True
        )
    )


def hash_gateway_spec(spec: InferenceServiceSpec) -> str:
    """Hash of what the user wrote that shapes the gateway's template alone; "" where that is nothing."""
    said = spec.gateway.model_dump(mode="json", by_alias=True, exclude={"replicas"}, exclude_defaults=True)
    return content_hash(said) if said else ""


def content_hash(content: Any) -> str:
    """A short hash that depends on values only, not on the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[: names.HASH_LENGTH]


def pin_of(status: Mapping[str, Any]) -> RevisionPin | None:
    """The pin in a status; None where none was written, or not completely."""
    written = status.get("revision") or {}
    values = {field.name: written.get(_camel(field.name)) for field in fields(RevisionPin)}
    if any(values[field.name] is None for field in fields(RevisionPin) if field.default is MISSING):
        return None
    seconds = values.pop("drain_timeout_seconds") or 0
    told = {name: str(value) for name, value in values.items() if value is not None}
    return RevisionPin(**told, drain_timeout_seconds=int(seconds))


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
