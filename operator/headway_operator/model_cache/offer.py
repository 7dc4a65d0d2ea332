"""How services come to what a ModelCache holds: `cache://NAME` becomes the folder on its claim.

A service is rendered, judged and hashed as if it named that folder itself (`pvc://CLAIM/PATH`). The path has
the commit or digest in it, so that other content is another spec and rolls the service; an upgrade of the
operator is not. While a cache has nothing in force there is nothing to render, and the reason is said.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from headway_operator.conditions.lack import Lack
from headway_operator.model_cache.content import content_of
from headway_operator.model_cache.course import EVERYDAY_REASONS
from headway_operator.spec import InferenceServiceSpec, Manifest, Service
from headway_operator.spec.fields import sources_of

PREFIX = "cache://"
# Of an object that has been observed by nobody yet.
NOT_LOOKED_AT = "the operator has not looked at it yet"


def caches_used(spec: InferenceServiceSpec) -> tuple[str, ...]:
    """Names of the caches that a service's sources name, each once."""
    return tuple(dict.fromkeys(_name(one) for one in sources_of(spec) if one.startswith(PREFIX)))


def uses(manifest: Mapping[str, Any], cache_name: str) -> bool:
    """Whether the InferenceService, as anybody may have written it, names this cache."""
    return f"{PREFIX}{cache_name}" in _sources(manifest.get("spec"))


def _sources(part: Any) -> Iterator[str]:
    """Everything that stands under the name `source`, at whichever depth."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "source" and isinstance(value, str):
                yield value
            elif name != "template":
                yield from _sources(value)
    elif isinstance(part, list):
        for one in part:
            yield from _sources(one)


def with_caches(service: Service, caches: Mapping[str, Manifest | None]) -> tuple[Service, Lack | None]:
    """The service with folders in place of caches, or what it lacks. caches: by name; None: not there."""
    offers = {f"{PREFIX}{name}": _offer(manifest) for name, manifest in caches.items()}
    for name, manifest in caches.items():
        if offers[f"{PREFIX}{name}"] is None:
            return service, _lack(name, manifest)
    return replace(service, spec=_with_sources(service.spec, offers)), None


def is_other_offer(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> bool:
    """Whether services that use the cache have something new to see in it."""
    if old is None or old["metadata"].get("uid") != new["metadata"].get("uid"):
        return True
    return _seen(old) != _seen(new)


def _seen(manifest: Mapping[str, Any]) -> tuple[str | None, str, str]:
    ready = _ready(manifest)
    return _offer(manifest), str(ready.get("reason", "")), str(ready.get("status", ""))


def _offer(manifest: Mapping[str, Any] | None) -> str | None:
    """The source that a cache stands for now."""
    content = None if manifest is None else content_of(manifest.get("status") or {})
    return None if content is None else f"pvc://{content.claim_name}/{content.path}"


def _lack(name: str, manifest: Mapping[str, Any] | None) -> Lack:
    if manifest is None:
        message = f"there is no ModelCache {name!r} in this namespace; make it, or change the source"
        return Lack("ModelCacheMissing", message, is_stuck=True)
    ready = _ready(manifest)
    told = ": ".join(part for part in (ready.get("reason"), ready.get("message")) if part) or NOT_LOOKED_AT
    message = f"ModelCache {name}: {told}"
    if ready and (ready["reason"] not in EVERYDAY_REASONS or ready["reason"] == "Suspended"):
        return Lack("ModelCacheFailed", message, is_stuck=True)
    return Lack("ModelCacheFetching", message, is_stuck=False)


def _ready(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    conditions = (manifest.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == "Ready"), {})


def _with_sources(spec: InferenceServiceSpec, offers: Mapping[str, str | None]) -> InferenceServiceSpec:
    """Each source that is a cache exchanged for what that offers."""

    def moved(source: str) -> str:
        return offers.get(source) or source

    changes: dict[str, Any] = {"model": spec.model.model_copy(update={"source": moved(spec.model.source)})}
    if spec.speculative is not None and spec.speculative.draft is not None:
        draft = spec.speculative.draft.model_copy(update={"source": moved(spec.speculative.draft.source)})
        changes["speculative"] = spec.speculative.model_copy(update={"draft": draft})
    if spec.lora is not None:
        adapters = [one.model_copy(update={"source": moved(one.source)}) for one in spec.lora.adapters]
        changes["lora"] = spec.lora.model_copy(update={"adapters": adapters})
    if spec.quality is not None and spec.quality.baseline.source is not None:
        source = moved(spec.quality.baseline.source)
        baseline = spec.quality.baseline.model_copy(update={"source": source})
        changes["quality"] = spec.quality.model_copy(update={"baseline": baseline})
    return spec.model_copy(update=changes)


def _name(source: str) -> str:
    return source.removeprefix(PREFIX)
