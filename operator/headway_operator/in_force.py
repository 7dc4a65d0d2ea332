"""Which spec a service goes by: its own or, where that one is refused, the last that was accepted.

An edit that cannot be honoured must not stop what serves: replicas and limits go on following the load, and
drift is repaired, by the spec before it. The last accepted spec is kept in the checkpoint, so that an
operator that starts over a refused one goes by it as well. A spec is accepted once its children could be
rendered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_operator.spec import Manifest, generation_of


@dataclass(frozen=True, slots=True)
class Accepted:
    """A spec that could be honoured, its generation, and the uid of the service that had it."""

    uid: str
    generation: int
    spec: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"uid": self.uid, "generation": self.generation, "spec": self.spec}


def accepted(manifest: Manifest) -> Accepted:
    """The spec of this manifest."""
    return Accepted(_uid(manifest), generation_of(manifest), manifest.get("spec") or {})


def read(data: object) -> Accepted | None:
    """What `to_dict` wrote; None for anything else, such as a checkpoint of before there was one."""
    if not isinstance(data, Mapping):
        return None
    uid, generation, spec = (data.get(name) for name in ("uid", "generation", "spec"))
    if isinstance(uid, str) and isinstance(generation, int) and isinstance(spec, Mapping):
        return Accepted(uid, generation, spec)
    return None


def instead_of(manifest: Manifest, last: Accepted | None) -> Manifest | None:
    """The manifest with the spec in force; None where there is none, or where that is what was refused."""
    if last is None or last.uid != _uid(manifest) or last.spec == manifest.get("spec"):
        return None
    return {
        **manifest,
        "metadata": {**manifest["metadata"], "generation": last.generation},
        "spec": last.spec,
    }


def _uid(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("uid") or "")
