"""What an edit of a manifest file changed, in words for whoever saved it. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

_LONGEST_VALUE = 60
NEW_REPLICAS = "new replicas replace the old ones, which serve until those are ready"
SAME_REPLICAS = "replicas that were started with these fields still run, and stay"
NOTHING_NEW = "no field differs from what was in force"


class Documents(Protocol):
    """What a manifest file holds."""

    @property
    def service(self) -> Mapping[str, Any]: ...
    @property
    def secrets(self) -> Mapping[str, Any]: ...
    @property
    def config_maps(self) -> Mapping[str, Any]: ...


def changes(old: Documents, new: Documents) -> list[str]:
    """One entry per changed field, `slo.ttftMilliseconds 250 -> 300`; Secrets and ConfigMaps by name."""
    found = [text.removeprefix("spec.") for text in _fields("", old.service, new.service)]
    for kind, before, after in (
        ("Secret", old.secrets, new.secrets),
        ("ConfigMap", old.config_maps, new.config_maps),
    ):
        names = sorted(before.keys() | after.keys())
        found += [f"{kind} {name} changed" for name in names if before.get(name) != after.get(name)]
    return found


def taken_over(changed: list[str], *, is_new_revision: bool, is_there: bool = False) -> str:
    """The line that acknowledges an edit. is_there: whether that revision has a ready replica already."""
    told = f"manifest taken over: {', '.join(changed) or NOTHING_NEW}"
    return f"{told}; {SAME_REPLICAS if is_there else NEW_REPLICAS}" if is_new_revision else told


def _fields(path: str, old: Any, new: Any) -> Iterator[str]:
    if old == new:
        return
    mappings = [one for one in (old, new) if isinstance(one, Mapping)]
    others = [one for one in (old, new) if not isinstance(one, Mapping) and one is not None]
    if not others and any(mappings):
        before, after = old or {}, new or {}
        for key in sorted({*before, *after}, key=str):
            yield from _fields(f"{path}.{key}" if path else str(key), before.get(key), after.get(key))
        return
    texts = [_shown(one) for one in (old, new)]
    # Long lists, of containers for one, say nothing cut short; what is secret in them stays there.
    is_long = any(len(text) > _LONGEST_VALUE for text in texts)
    yield f"{path} changed" if is_long else f"{path} {texts[0]} -> {texts[1]}"


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, str) and value and not set(value) & set(" \n\t,"):
        return value
    return json.dumps(value, default=str)
