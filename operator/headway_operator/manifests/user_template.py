"""A user's pod template over one of the operator's: merged strategically, and held to what it may do."""

from dataclasses import dataclass
from typing import Any

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests.operator_key import refuse_key_in
from headway_operator.manifests.restricted import faults
from headway_operator.manifests.strategic_merge import merge
from headway_operator.manifests.template_shape import check_merged, check_types
from headway_operator.state import Site


@dataclass(frozen=True, slots=True)
class Place:
    """Where such a template stands. field: of the manifest. container: the operator's own in the pod."""

    field: str
    container: str


GRACE = "terminationGracePeriodSeconds"
REPLICAS = Place("spec.template", names.RUNTIME_CONTAINER)
GATEWAYS = Place("spec.gateway.template", names.GATEWAY_CONTAINER)


def with_template(
    ours: dict[str, Any], template: dict[str, Any], site: Site, place: Place, *, account: str | None = None
) -> dict[str, Any]:
    """The user's template over ours, whose labels stay, and time to end at the least. Raises SpecError.

    account: the ServiceAccount whose token the pod has; None where it has none.
    """
    _check(template, place)
    merged = merge(ours, template, place.field)
    containers = merged["spec"].get("containers") or []
    if not any(container.get("name") == place.container for container in containers):
        raise SpecError(
            f"{place.field}.spec.containers", f"deletes the container `{place.container}`; keep it"
        )
    check_merged(merged, place.field)
    merged["spec"]["containers"] = _with_own_arguments(ours, containers, place)
    if site.kind == "kubernetes":
        refuse_key_in(merged, place.field)
        if not site.allows_unrestricted:
            _refuse_faults(merged, place, account)
    grace = merged["spec"].get(GRACE)
    if grace is None or grace < ours["spec"][GRACE]:
        merged["spec"][GRACE] = ours["spec"][GRACE]
    labels = {**merged["metadata"].get("labels", {}), **ours["metadata"]["labels"]}
    merged["metadata"]["labels"] = labels
    return merged


def _with_own_arguments(
    ours: dict[str, Any], containers: list[dict[str, Any]], place: Place
) -> list[dict[str, Any]]:
    """The arguments stay in a container that replaced the operator's own: no template can have them."""
    own = next(one for one in ours["spec"]["containers"] if one["name"] == place.container)
    return [{**one, "args": own["args"]} if one.get("name") == place.container else one for one in containers]


def _refuse_faults(template: dict[str, Any], place: Place, account: str | None) -> None:
    found = faults(template, account)
    if found:
        path, remedy = found[0]
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        raise SpecError(
            f"{place.field}.{path}",
            f"is not allowed in pods that the operator makes; {remedy}, or have it run with "
            f"--allow-unrestricted-templates{more}",
            reason="TemplateNotAllowed",
        )


def _check(template: dict[str, Any], place: Place) -> None:
    """Refuse what would be lost or would escape: other parts than these, other types, our own arguments."""
    _check_fields(place.field, template, ("metadata", "spec"))
    _check_fields(f"{place.field}.metadata", template.get("metadata") or {}, ("labels", "annotations"))
    for field in template:
        if not isinstance(template[field], dict):
            raise SpecError(f"{place.field}.{field}", f"{template[field]!r} is not an object; write a map")
    check_types(template, place.field)
    for container in (template.get("spec") or {}).get("containers") or []:
        if container.get("name") == place.container and "args" in container:
            raise SpecError(
                f"{place.field}.spec.containers[name={place.container}].args",
                "the operator writes the arguments from the other fields of the spec; change those, "
                "or set `command` to change what they are passed to",
            )


def _check_fields(path: str, value: Any, allowed: tuple[str, ...]) -> None:
    unknown = [] if not isinstance(value, dict) else sorted(set(value) - set(allowed), key=str)
    if unknown:
        raise SpecError(f"{path}.{unknown[0]}", f"is not used; write only {' and '.join(allowed)}")
