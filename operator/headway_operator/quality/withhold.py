"""Holds a revision back until the gate is open: what serves goes on, and nothing of the new one starts.

A revision that serves already is never taken away, whatever a verdict on it says later: a gate that is put
up, or made narrower, before a service with traffic must not end that traffic.
"""

from dataclasses import replace

from headway_operator import names
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.render import pin_of
from headway_operator.quality.gate import Gate
from headway_operator.spec import Service
from headway_operator.state import ChildKey, Rendered, RevisionPin, Site


def gated(
    service: Service, site: Site, rendered: Rendered, gate: Gate | None, existing: frozenset[ChildKey]
) -> Rendered:
    """The children as the gate allows them, the Job that judges among them."""
    if gate is None:
        return rendered
    if gate.job:
        rendered = replace(rendered, keep=rendered.keep | {ChildKey("Job", gate.job)})
    if gate.begins:
        job = evaluation_job(service, site, rendered.revision.runtime_image, gate.job)
        rendered = replace(rendered, manifests=(*rendered.manifests, job))
    serving, candidate = _serving(service, existing), rendered.revision
    # Without a pin, what is there was let through before the status was lost.
    is_served = bool(names.revision_children(candidate.name) & existing)
    if gate.is_open or (is_served and (serving is None or serving.name == candidate.name)):
        return rendered
    return withheld(service, rendered, existing)


def withheld(service: Service, rendered: Rendered, existing: frozenset[ChildKey]) -> Rendered:
    """The children without the revision that is rendered; what serves, if anything does, in its place."""
    serving, candidate = _serving(service, existing), rendered.revision
    left_out = set(names.revision_children(candidate.name))
    keep = rendered.keep - left_out
    gateway = ChildKey("Deployment", names.gateway(service.name))
    if serving is not None:
        keep |= names.revision_children(serving.name)
        if gateway in existing:
            # It was pinned with the revision that serves, and changes with the next one.
            left_out.add(gateway)
    return replace(
        rendered,
        revision=serving or candidate,
        manifests=tuple(
            manifest
            for manifest in rendered.manifests
            if ChildKey(manifest["kind"], manifest["metadata"]["name"]) not in left_out
        ),
        keep=keep,
        withheld=candidate.name,
    )


def _serving(service: Service, existing: frozenset[ChildKey]) -> RevisionPin | None:
    """The revision that status names, if it is there."""
    pin = pin_of(service.status)
    return pin if pin is not None and names.revision_children(pin.name) & existing else None
