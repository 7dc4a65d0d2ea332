"""What the API server has, kept up to date in memory by one list and one watch for each kind.

A pass over a service reads nine kinds of objects; asked for one by one, a thousand services would be two
thousand calls a second. So each kind is watched once, for all services; where some namespaces are looked
after and not all, once in each. Objects are kept without what nobody reads (`kubernetes_trim`); kinds of
which only owner and name matter are watched as bare metadata.

A kind is either current or not said: from the first complete list until it can neither be watched nor listed
anew in time. A watch that has expired (410) is followed by a list. Where that fails, or the watch cannot be
begun again, `objects` answers None, upon which the caller asks the API server itself. Nothing here is ever
written to the API server; what was just written may be put in at once (`put`), so that the next pass sees it.
"""

import asyncio
import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from headway_operator.cluster.kubernetes_api import Json, KubernetesApi
from headway_operator.cluster.kubernetes_trim import METADATA_KINDS, trim
from headway_operator.errors import AbsentError, ClusterError, ForbiddenError
from headway_operator.names import (
    CACHE_KIND,
    CACHE_LABEL,
    CLAIM,
    KIND,
    OPTIONAL_KINDS,
    SERVICE_LABEL,
    CacheKey,
    ServiceKey,
)

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 5.0
# A right that is not there may be given later; until then the kind is read by the caller.
FORBIDDEN_RETRY_SECONDS = 600.0
# A kind of which there is no definition: the chart that brings it may be upgraded any time.
ABSENT_RETRY_SECONDS = 60.0
# A watch that has ended is begun again at its last version within this time, and is current all the while.
GRACE_SECONDS = 15.0
# Between two watches, also when the API server ends each at once.
RECONNECT_SECONDS = 0.1
EXPIRED = 410
# Kinds of ours, whose changes are about themselves.
OWN_KINDS: dict[str, type[ServiceKey]] = {KIND: ServiceKey, CACHE_KIND: CacheKey}
# Kinds whose status is news to those who own them.
TOLD_BY_STATUS = ("Pod", "Job", CLAIM)

Name = tuple[str, str]  # namespace, name


class _Kind:
    """All objects of one kind, by name and by the service or cache whose label they carry."""

    def __init__(self) -> None:
        self.is_current = False
        self.objects: dict[Name, Json] = {}
        self.by_owner: defaultdict[ServiceKey, dict[str, Json]] = defaultdict(dict)

    def put(self, item: Json) -> bool:
        """Take it in unless a newer one is there; whether it was."""
        metadata = item["metadata"]
        name = (metadata["namespace"], metadata["name"])
        if (known := self.objects.get(name)) is not None and _version(known) >= _version(item):
            return False
        if known is not None and _owner_of(known) != _owner_of(item):
            self.remove(name)
        self.objects[name] = item
        if (key := _owner_of(item)) is not None:
            self.by_owner[key][metadata["name"]] = item
        return True

    def remove(self, name: Name) -> None:
        """Forget it."""
        item = self.objects.pop(name, None)
        if item is not None and (key := _owner_of(item)) is not None:
            self.by_owner[key].pop(name[1], None)
            if not self.by_owner[key]:
                del self.by_owner[key]

    def replace(self, items: Iterable[Json]) -> None:
        """Hold exactly these, but for newer ones of the same names."""
        listed = list(items)
        names = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in listed}
        for gone in self.objects.keys() - names:
            self.remove(gone)
        for item in listed:
            self.put(item)


class KubernetesCache:
    """Every kind that passes read. `run` keeps it; `on_change` hears of services whose objects changed."""

    def __init__(
        self,
        api: KubernetesApi,
        namespaces: Sequence[str],
        selectors: Mapping[str, str],
        on_change: Callable[[str, ServiceKey, Json | None, Json], None] = lambda kind, key, old, new: None,
    ) -> None:
        """namespaces: those looked after; none for all of them, which is one watch for each kind. selectors:
        kind -> label selector, "" for every object.

        on_change: kind, service, the object as it was (None: not known) and as it is.
        """
        self._api = api
        self._namespaces = tuple(namespaces) or ("",)
        self._selectors = selectors
        self._on_change = on_change
        watches = [(kind, namespace) for kind in selectors for namespace in self._namespaces]
        self._held = {watch: _Kind() for watch in watches}
        self._tried = {watch: asyncio.Event() for watch in watches}

    def objects(self, kind: str, key: ServiceKey) -> list[Json] | None:
        """Those with the label of this service or cache; None while the kind is not current."""
        held = self._of(kind, key.namespace)
        return None if held is None else list(held.by_owner.get(key, {}).values())

    def all_in(self, kind: str, namespace: str) -> list[Json] | None:
        """All of a kind in a namespace; None while it is not current."""
        held = self._of(kind, namespace)
        if held is None:
            return None
        return [item for (where, _), item in held.objects.items() if where == namespace]

    def names(self, kind: str) -> list[Name]:
        """Namespace and name of all of a kind that are known, wherever they are."""
        return [name for (one, _), held in self._held.items() if one == kind for name in held.objects]

    def get(self, kind: str, namespace: str, name: str) -> tuple[bool, Json | None]:
        """Whether the kind is current, and the object if there is one."""
        held = self._of(kind, namespace)
        return (False, None) if held is None else (True, held.objects.get((namespace, name)))

    def put(self, item: Json) -> None:
        """What the API server answered to a write."""
        kind, metadata = str(item.get("kind", "")), item["metadata"]
        if (held := self._of(kind, metadata["namespace"])) is None:
            return
        new, old = trim(kind, item), held.objects.get((metadata["namespace"], metadata["name"]))
        if held.put(new):
            self._tell(kind, old, new)

    def current_kinds(self) -> set[str]:
        """Kinds that are answered from memory now, wherever they are."""
        unsaid = {kind for (kind, _), held in self._held.items() if not held.is_current}
        return {kind for kind, _ in self._held} - unsaid

    def _of(self, kind: str, namespace: str) -> _Kind | None:
        """What is held of a kind there; None while it is not current."""
        held = self._held.get((kind, namespace)) or self._held.get((kind, ""))
        return held if held is not None and held.is_current else None

    async def tried(self, seconds: float) -> None:
        """Until every kind is current or could not be read; for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for event in self._tried.values():
                    await event.wait()

    async def run(self) -> None:
        """Keep every kind until cancelled; afterwards nothing is said to be current."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for kind, namespace in self._held:
                    tasks.create_task(self._keep(kind, namespace), name=f"watch {kind} {namespace}")
        finally:
            for held in self._held.values():
                held.is_current = False

    async def _keep(self, kind: str, namespace: str) -> None:
        watch, next_wait = (kind, namespace), FIRST_RETRY_SECONDS
        held = self._held[watch]
        while True:
            wait, next_wait = next_wait, min(2 * next_wait, LONGEST_RETRY_SECONDS)
            try:
                await self._require(kind)
                version = await self._list(kind, namespace)
                held.is_current, next_wait = True, FIRST_RETRY_SECONDS
                self._tried[watch].set()
                await self._follow(kind, namespace, version)
                logger.debug("%s: its watch expired; it is listed anew", kind)
                # A second old is current enough; without it every pass would ask the API server meanwhile.
                await asyncio.sleep(FIRST_RETRY_SECONDS)
                continue
            except ForbiddenError as error:
                wait = FORBIDDEN_RETRY_SECONDS
                logger.warning("%s is asked for pass by pass, which is slow: %s", kind, error)
            except AbsentError as error:
                wait = ABSENT_RETRY_SECONDS
                is_usual = kind in OPTIONAL_KINDS or self._tried[watch].is_set()
                level = logging.DEBUG if is_usual else logging.WARNING
                logger.log(level, "%s is not known here, as its definition is not installed: %s", kind, error)
            except ClusterError as error:
                logger.warning("%s cannot be watched; it is tried again in %g s: %s", kind, wait, error)
            except Exception:
                # A defect must not leave a kind as it was for ever, nor end the operator.
                logger.exception("%s cannot be watched; it is tried again in %g s", kind, wait)
            held.is_current = False
            self._tried[watch].set()
            await asyncio.sleep(wait)

    async def _require(self, kind: str) -> None:
        """Raises AbsentError for a kind that the cluster lacks and may lack: no role grants it there, and the
        API server asks for rights before it says that there is no such kind."""
        if kind in OPTIONAL_KINDS and kind not in await self._api.served_kinds(OPTIONAL_KINDS[kind]):
            raise AbsentError(f"{kind} of {OPTIONAL_KINDS[kind]} is not served")

    async def _list(self, kind: str, namespace: str) -> str:
        is_bare, labels = kind in METADATA_KINDS, self._selectors[kind]
        kept = functools.partial(trim, kind)
        items, version = await self._api.list_all(kind, namespace, labels, is_bare=is_bare, kept=kept)
        held = self._held[kind, namespace]
        before = dict(held.objects)
        held.replace(items)
        for name, item in held.objects.items():
            if (old := before.get(name)) is not item:
                self._tell(kind, old, item)
        for name in sorted(before.keys() - held.objects.keys()):
            self._tell(kind, self._of_gone(kind, before[name]), before[name])
        return version

    async def _follow(self, kind: str, namespace: str, version: str) -> None:
        """Until the watch has expired. Raises ClusterError when it cannot be begun again in time."""
        is_bare, labels, clock = (
            kind in METADATA_KINDS,
            self._selectors[kind],
            asyncio.get_running_loop().time,
        )
        failing_since: float | None = None
        while True:
            try:
                async for event in self._api.watch(kind, namespace, labels, version, is_bare=is_bare):
                    item = event["object"]
                    if event["type"] == "ERROR":
                        if item.get("code") == EXPIRED:
                            return
                        raise ClusterError(f"watch of {kind}: {item.get('message') or item}")
                    failing_since, version = None, item["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._take(kind, namespace, event["type"], trim(kind, item))
                failing_since = None
            except ForbiddenError:
                raise
            except ClusterError:
                failing_since = clock() if failing_since is None else failing_since
                if clock() - failing_since > GRACE_SECONDS:
                    raise
                await asyncio.sleep(FIRST_RETRY_SECONDS)
            await asyncio.sleep(RECONNECT_SECONDS)

    def _take(self, kind: str, namespace: str, event: str, item: Json) -> None:
        held = self._held[kind, namespace]
        name = (item["metadata"]["namespace"], item["metadata"]["name"])
        old = held.objects.get(name)
        if event == "DELETED":
            held.remove(name)
            self._tell(kind, self._of_gone(kind, old), item)
        elif held.put(item):
            self._tell(kind, old, item)

    def _of_gone(self, kind: str, old: Json | None) -> Json | None:
        """What an object that is gone is said to have been: a cache nothing, so that services hear of it."""
        return None if kind == CACHE_KIND else old

    def _tell(self, kind: str, old: Json | None, new: Json) -> None:
        metadata = new["metadata"]
        key = _owner_of(new)
        if kind in OWN_KINDS:
            key = OWN_KINDS[kind](metadata["namespace"], metadata["name"])
        if key is not None:
            self._on_change(kind, key, old, new)


def is_news(kind: str, old: Json | None, new: Json) -> bool:
    """Whether a change is a reason for a pass: of the spec, or of what pods, Jobs and claims do.

    What an operator writes itself, a status or a child, is none.
    """
    if old is None or old["metadata"].get("deletionTimestamp") != new["metadata"].get("deletionTimestamp"):
        return kind in (*OWN_KINDS, *TOLD_BY_STATUS)
    if kind in OWN_KINDS:
        return bool(old["metadata"].get("generation") != new["metadata"].get("generation"))
    return kind in TOLD_BY_STATUS and old.get("status") != new.get("status")


def _owner_of(item: Json) -> ServiceKey | None:
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    if (cache := labels.get(CACHE_LABEL)) is not None:
        return CacheKey(metadata["namespace"], cache)
    name = labels.get(SERVICE_LABEL)
    return None if name is None else ServiceKey(metadata["namespace"], name)


def _version(item: Json) -> int:
    """Versions of one kind can be compared, https://kubernetes.io/docs/reference/using-api/api-concepts/."""
    text = str(item["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdigit() else 0
