"""What was applied and what the API server made of it, so that what nobody changed is not written again.

A child is as it was applied if it is to be the same as then, and if either that was less than a minute ago or
what is kept in memory shows no trace of anybody since. Traces are kept with the controller's checkpoint: a
fresh operator then writes only what differs, instead of a dozen children of every service.

A child that is kept and not rendered has a trace, too: of when it was looked at last.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway_operator.cluster.kubernetes_api import Json
from headway_operator.cluster.kubernetes_cache import KubernetesCache
from headway_operator.names import LAST_APPLIED_ANNOTATION, REVISION_KINDS
from headway_operator.state import ChildKey, Manifest, ServiceKey

# What was applied is applied anew after this time, which undoes what others changed in it; unless what is
# kept in memory shows that nobody did.
REAPPLY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Applied:
    """One child as it was applied last. trace: changes when anybody changes it. at: seconds of the clock.

    digest: "" of one of which nothing is known but how it looked.
    """

    digest: str
    trace: str
    at: float


class AppliedChildren:
    """Of all services. clock: seconds."""

    def __init__(self, cache: KubernetesCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._of: dict[ServiceKey, dict[ChildKey, _Applied]] = {}

    def is_as_applied(self, key: ServiceKey, child: ChildKey, manifest: Manifest) -> bool:
        """Whether it was applied so, lately or with no trace of anybody else since."""
        applied = self._of.get(key, {}).get(child)
        if applied is None or applied.digest != _digest(manifest):
            return False
        return self._is_untouched(key, child, applied)

    def is_as_left(self, key: ServiceKey, child: ChildKey) -> bool:
        """Whether one that is not rendered was looked at, lately or with no trace of anybody else since."""
        applied = self._of.get(key, {}).get(child)
        return applied is not None and self._is_untouched(key, child, applied)

    def _is_untouched(self, key: ServiceKey, child: ChildKey, applied: _Applied) -> bool:
        if self._clock() - applied.at < REAPPLY_SECONDS:
            return True
        is_known, now = self._cache.get(child.kind, key.namespace, child.name)
        return is_known and now is not None and _trace(now) == applied.trace

    def saw(self, key: ServiceKey, child: ChildKey, found: Json) -> None:
        """found: the object as it is, which there is nothing to compare with."""
        self._of.setdefault(key, {})[child] = _Applied("", _trace(found), self._clock())

    def remember(self, key: ServiceKey, child: ChildKey, manifest: Manifest, written: Json) -> None:
        """written: the object as the API server has it after `manifest` was applied."""
        applied = _Applied(_digest(manifest), _trace(written), self._clock())
        self._of.setdefault(key, {})[child] = applied

    def forget(self, key: ServiceKey, child: ChildKey | None = None) -> None:
        """One child, or all of a service."""
        if child is None:
            self._of.pop(key, None)
        else:
            self._of.get(key, {}).pop(child, None)

    def clear(self) -> None:
        """Forget everything."""
        self._of.clear()

    def to_json(self, key: ServiceKey, besides: ChildKey) -> str:
        """What `resume` needs of one service. besides: the child into which this is written."""
        known = sorted(self._of.get(key, {}).items())
        rows = [[child.kind, child.name, one.digest, one.trace] for child, one in known if child != besides]
        return json.dumps(rows, separators=(",", ":"))

    def resume(self, key: ServiceKey, text: str) -> None:
        """Take over what an operator before this one wrote down. ValueError: it is nothing of the kind."""
        rows = json.loads(text)
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
            raise ValueError("not rows of kind, name, digest and trace")
        for kind, name, digest, trace in rows:
            # Long ago: only what has left no trace since counts.
            one = _Applied(str(digest), str(trace), float("-inf"))
            self._of.setdefault(key, {}).setdefault(ChildKey(str(kind), str(name)), one)


def _digest(manifest: Manifest) -> str:
    """Of what is written: the annotation says the same once more, and earlier versions wrote none."""
    annotation = LAST_APPLIED_ANNOTATION if manifest["kind"] in REVISION_KINDS else ""
    return hashlib.sha256((json.dumps(manifest, sort_keys=True) + annotation).encode()).hexdigest()


def _trace(item: Mapping[str, Any]) -> str:
    """Of kinds that count generations, the latter and the labels: their version moves with each status."""
    metadata = item["metadata"]
    if "generation" not in metadata:
        return str(metadata.get("resourceVersion", ""))
    return json.dumps([metadata["generation"], metadata.get("labels")], sort_keys=True)
