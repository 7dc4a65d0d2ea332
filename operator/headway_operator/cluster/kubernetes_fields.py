"""Keeps the fields of children as they were rendered, without a fight over them.

The algorithm, for each child:

1. Apply without force. Nothing is in the way as a rule, and that is all. 2. Others have set fields that we
set: somebody's hand, or a tool that was run once. Take them back by force; that
   is how drift is repaired.
3. The same others set them once more within ten minutes: that is a controller, which would win every second
round.
   Leave the object to it, as it is, and say who and which fields; what else changes in the child waits too.
   After ten minutes take them back once more.

So two controllers write an object at most once each in ten minutes, whatever the other one does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.errors import FieldConflictError
from headway_operator.state import ChildKey, ServiceKey

PEACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _TakenBack:
    managers: tuple[str, ...]
    at: float


class FieldKeeper:
    """Applies children. clock: seconds."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._taken_back: dict[tuple[ServiceKey, ChildKey], _TakenBack] = {}

    async def apply(self, key: ServiceKey, child: ChildKey, manifest: Mapping[str, Any]) -> Json:
        """Server-side apply; the object as it then is. FieldConflictError where fields are left to others."""
        try:
            return await self._api.apply(manifest, force=False)
        except FieldConflictError as conflict:
            before = self._taken_back.get((key, child))
            is_recent = before is not None and self._clock() - before.at < PEACE_SECONDS
            if before is not None and is_recent and set(before.managers) & set(conflict.managers):
                raise FieldConflictError(
                    f"{' and '.join(conflict.managers)} set {', '.join(conflict.fields)} of {child.kind} "
                    f"{child.name!r} again and again; it is left as it is for {PEACE_SECONDS:g} s at a time: "
                    "have them leave these fields alone",
                    conflict.managers,
                    conflict.fields,
                ) from conflict
            self._taken_back[(key, child)] = _TakenBack(conflict.managers, self._clock())
            return await self._api.apply(manifest, force=True)

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone."""
        for pair in [pair for pair in self._taken_back if pair[0] == key]:
            del self._taken_back[pair]
