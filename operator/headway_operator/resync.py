"""Holds the watch to account: lists all services now and then, for what it should have brought and has not.

A watch that is wedged brings nothing and says nothing; the services that are known go on being looked after,
but a new one, or an edit, would wait for ever. So a list names every service with its generation: what is
newer than the watch has shown is passed over at once, by what the API server says (`owes`), as other watches
may be as silent; and as long as the watch does not show it either, `lag_seconds` grows, by which liveness
judges.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway_operator.errors import ClusterError
from headway_operator.state import ServiceKey

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0
# Between two lists while the watch is behind: it may just have been overtaken.
DOUBT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Version:
    """Of one service, as a list or the watch showed it."""

    uid: str
    generation: int

    def is_newer_than(self, other: "Version | None") -> bool:
        """Whether the other one does not know of it. A deleted and remade service has another uid."""
        return other is None or other.uid != self.uid or other.generation < self.generation


def version_of(metadata: Mapping[str, Any]) -> Version:
    """From an object's metadata."""
    return Version(str(metadata.get("uid", "")), int(metadata.get("generation") or 0))


class Resync:
    """Compares lists with what the watch has shown. seen: kept up to date by whoever watches."""

    def __init__(
        self,
        list_metadata: Callable[[], Awaitable[Iterable[Mapping[str, Any]]]],
        seen: Mapping[ServiceKey, Version],
        on_change: Callable[[ServiceKey], None],
        on_missed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """list_metadata: the metadata of every service. on_missed: the watch is behind by one change more."""
        self._list_metadata = list_metadata
        self._seen = seen
        self._on_change = on_change
        self._on_missed = on_missed
        self._clock = clock
        self._unseen: dict[
            ServiceKey, tuple[Version, float, bool]
        ] = {}  # since when, and whether it was counted

    def lag_seconds(self) -> float:
        """For how long the watch has owed a change; 0 when it owes none."""
        now = self._clock()
        owed = [
            since
            for key, (version, since, _) in self._unseen.items()
            if version.is_newer_than(self._seen.get(key))
        ]
        return max((now - since for since in owed), default=0.0)

    def owes(self, key: ServiceKey) -> bool:
        """Whether the watch owes a change of this one, so that what is in memory may be older, too."""
        version, _, _ = self._unseen.get(key, (None, 0.0, False))
        return version is not None and version.is_newer_than(self._seen.get(key))

    async def run(self) -> None:
        """Compare until cancelled."""
        while True:
            await asyncio.sleep(DOUBT_SECONDS if self._unseen else PERIOD_SECONDS)
            try:
                self.compare(await self._list_metadata())
            except ClusterError as error:
                logger.warning("services cannot be listed: %s", error)

    def compare(self, listed: Iterable[Mapping[str, Any]]) -> None:
        """Take one list in."""
        now, unseen = self._clock(), {}
        for metadata in listed:
            key, version = ServiceKey(metadata["namespace"], metadata["name"]), version_of(metadata)
            if not version.is_newer_than(self._seen.get(key)):
                continue
            _, since, is_counted = self._unseen.get(key, (version, now, False))
            if now > since and not is_counted:  # one that a second list shows as well was not just overtaken
                logger.warning("%s: the watch has not shown generation %d", key, version.generation)
                self._on_missed()
                is_counted = True
            unseen[key] = (version, since, is_counted)
            self._on_change(key)
        self._unseen = unseen
