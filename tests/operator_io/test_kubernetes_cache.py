"""A kind is answered from memory while it is current, and not a moment longer than that is known."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headway_operator.cluster import kubernetes_cache
from headway_operator.cluster.kubernetes_cache import KubernetesCache, is_news
from headway_operator.cluster.kubernetes_trim import trim
from headway_operator.errors import AbsentError, ClusterError, ForbiddenError, UnavailableError
from headway_operator.names import CACHE_KIND, CACHE_LABEL, CLAIM, KIND, SERVICE_LABEL, CacheKey, ServiceKey

KEY = ServiceKey("team", "demo")
Json = dict[str, Any]


def pod(name: str, version: int, service: str = "demo", **status: Any) -> Json:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": name,
        "resourceVersion": str(version),
        "labels": {SERVICE_LABEL: service},
        "managedFields": [{"manager": "kubelet"}],
    }
    container = {"name": "runtime", "env": [{"name": "A"}], "resources": {"limits": {"memory": "1Gi"}}}
    return {"metadata": metadata, "spec": {"containers": [container], "volumes": [{}]}, "status": status}


class ToldApi:
    """Lists `items`; a watch brings what is put into `events`, or raises it."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.version = 10
        self.events: asyncio.Queue[Json | Exception | None] = asyncio.Queue()
        self.fault: ClusterError | None = None
        self.lists = 0
        self.watched_from: list[str] = []

    async def list_all(
        self, kind: str, namespace: str, labels: str, *, is_bare: bool, kept: Callable[[Json], Json]
    ) -> Any:
        self.lists += 1
        if self.fault is not None:
            raise self.fault
        return tuple(map(kept, self.items)), str(self.version)

    async def watch(
        self, kind: str, namespace: str, labels: str, version: str, *, is_bare: bool
    ) -> AsyncIterator[Json]:
        self.watched_from.append(version)
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


class Kept:
    """A running cache of pods."""

    def __init__(self) -> None:
        api: Any = ToldApi()
        self.api = api
        self.changes: list[tuple[str, ServiceKey, bool]] = []
        self.cache = KubernetesCache(api, (), {"Pod": "managed=yes"}, self.note)

    def note(self, kind: str, key: ServiceKey, old: Json | None, new: Json) -> None:
        self.changes.append((new["metadata"]["name"], key, is_news(kind, old, new)))

    def names(self, key: ServiceKey = KEY) -> list[str] | None:
        held = self.cache.objects("Pod", key)
        return None if held is None else sorted(item["metadata"]["name"] for item in held)

    async def bring(self, kind: str, item: Json) -> None:
        await self.api.events.put({"type": kind, "object": item})


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    for name in ("FIRST_RETRY_SECONDS", "LONGEST_RETRY_SECONDS", "RECONNECT_SECONDS"):
        monkeypatch.setattr(kubernetes_cache, name, 0.001)
    one = Kept()
    one.api.items = [pod("a", 3), pod("b", 4), pod("x", 5, service="other")]
    task = asyncio.create_task(one.cache.run())
    yield one
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_list_and_what_follows_is_what_there_is(kept: Kept, eventually: Callable[..., Any]) -> None:
    await eventually(lambda: kept.names() == ["a", "b"])
    assert kept.names(ServiceKey("team", "other")) == ["x"]
    assert kept.names(ServiceKey("team", "none")) == []
    assert kept.cache.objects("Job", KEY) is None  # no such kind is kept
    await kept.bring("ADDED", pod("c", 11))
    await kept.bring("MODIFIED", pod("a", 12, phase="Running"))
    await kept.bring("DELETED", pod("b", 13))
    await eventually(lambda: kept.names() == ["a", "c"])
    is_current, a = kept.cache.get("Pod", "team", "a")
    assert is_current
    assert a is not None
    assert a["status"] == {"phase": "Running"}
    assert kept.changes[-3:] == [("c", KEY, True), ("a", KEY, True), ("b", KEY, False)]
    await kept.bring("MODIFIED", pod("a", 14, service="other"))  # somebody changed its label
    await eventually(lambda: kept.names() == ["c"])
    assert kept.names(ServiceKey("team", "other")) == ["a", "x"]


async def test_what_was_just_written_is_seen_at_once_and_not_undone_by_older_news(
    kept: Kept, eventually: Callable[..., Any]
) -> None:
    await eventually(kept.names)
    kept.cache.put({"kind": "Pod", **pod("a", 20, phase="Written")})
    await kept.bring("MODIFIED", pod("a", 15, phase="Older"))
    await kept.bring("ADDED", pod("c", 21))
    await eventually(lambda: kept.names() == ["a", "b", "c"])
    _, a = kept.cache.get("Pod", "team", "a")
    assert a is not None
    assert a["status"] == {"phase": "Written"}
    kept.cache.put({"kind": "Secret", **pod("s", 22)})  # not kept


async def test_a_watch_that_expires_is_followed_by_a_list_that_finds_what_was_missed(
    kept: Kept, eventually: Callable[..., Any]
) -> None:
    await eventually(kept.names)
    kept.api.items, kept.api.version = [pod("a", 3), pod("n", 30)], 30
    kept.changes.clear()
    await kept.bring("ERROR", {"code": 410, "message": "too old resource version"})
    await eventually(lambda: kept.names() == ["a", "n"])
    assert kept.api.lists == 2
    assert [name for name, _, _ in kept.changes] == ["n", "b", "x"]  # and who has gone meanwhile
    assert kept.names(ServiceKey("team", "other")) == []


async def test_a_watch_that_ends_goes_on_where_it_was(kept: Kept, eventually: Callable[..., Any]) -> None:
    await eventually(kept.names)
    await kept.bring("BOOKMARK", {"metadata": {"resourceVersion": "40"}})
    await kept.api.events.put(None)
    await eventually(lambda: kept.api.watched_from == ["10", "40"])
    await kept.api.events.put(UnavailableError("connection reset"))
    await eventually(lambda: kept.api.watched_from == ["10", "40", "40"])
    assert kept.names() == ["a", "b"]  # current all the while
    assert kept.api.lists == 1


async def test_a_watch_that_cannot_be_begun_again_in_time_is_not_believed(
    kept: Kept, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await eventually(kept.names)
    monkeypatch.setattr(kubernetes_cache, "GRACE_SECONDS", -1.0)
    kept.api.fault = UnavailableError("away")
    await kept.api.events.put(UnavailableError("connection refused"))
    await eventually(lambda: kept.names() is None)
    assert kept.cache.current_kinds() == set()
    kept.api.fault = None
    await eventually(lambda: kept.names() == ["a", "b"])


async def test_a_kind_that_may_not_be_watched_is_left_to_be_asked_for(
    eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    one = Kept()
    one.api.fault = ForbiddenError("cannot watch pods")
    task = asyncio.create_task(one.cache.run())
    async with asyncio.timeout(10):
        await one.cache.tried(5.0)
    assert one.names() is None
    assert one.api.lists == 1
    assert "Pod is asked for pass by pass" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_kind_without_a_definition_is_asked_for_again_and_said_once(
    eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_cache, "ABSENT_RETRY_SECONDS", 0.001)
    one = Kept()
    one.api.fault = AbsentError("404: page not found")
    task = asyncio.create_task(one.cache.run())
    await eventually(lambda: one.api.lists > 3)
    assert caplog.text.count("its definition is not installed") == 1
    one.api.fault = None
    await eventually(lambda: one.names() == [])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_a_model_cache_owns_is_told_apart_from_a_services(
    kept: Kept, eventually: Callable[..., Any]
) -> None:
    await eventually(kept.names)
    fetching = pod("f", 21)
    fetching["metadata"]["labels"] = {CACHE_LABEL: "demo"}
    await kept.bring("ADDED", fetching)
    key = CacheKey("team", "demo")
    await eventually(lambda: kept.names(key) == ["f"])
    assert kept.names() == ["a", "b"]
    assert kept.changes[-1] == ("f", key, True)
    assert key != KEY


def test_of_a_cache_that_is_written_or_gone_services_hear() -> None:
    """What the operator writes itself comes back by no watch: it was put in by hand."""
    told: list[tuple[ServiceKey, bool]] = []
    api: Any = ToldApi()
    one = KubernetesCache(
        api, (), {CACHE_KIND: ""}, lambda kind, key, old, new: told.append((key, old is None))
    )
    one._held[CACHE_KIND, ""].is_current = True
    key = CacheKey("team", "demo")
    one.put({"kind": CACHE_KIND, **pod("demo", 3)})
    one.put({"kind": CACHE_KIND, **pod("demo", 4, phase="x")})
    one.put({"kind": CACHE_KIND, **pod("demo", 4, phase="x")})
    one._take(CACHE_KIND, "", "DELETED", pod("demo", 5))
    assert told == [(key, True), (key, False), (key, True)]
    assert one.names(CACHE_KIND) == []


async def test_waiting_for_a_cache_has_an_end() -> None:
    one = Kept()  # which nobody runs
    async with asyncio.timeout(10):
        await one.cache.tried(0.01)
    assert one.names() is None


def test_only_what_is_read_is_kept() -> None:
    kept = trim("Pod", pod("a", 3, phase="Running"))
    assert kept["spec"] == {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "1Gi"}}}]}
    assert "managedFields" not in kept["metadata"]
    service = {
        "metadata": {"name": "demo", "namespace": "team", "managedFields": [], "annotations": {"a": "b"}}
    }
    whole = trim(KIND, {**service, "spec": {"replicas": 1}, "status": {"replicas": 1}})
    assert whole["spec"] == {"replicas": 1}
    assert whole["metadata"]["annotations"] == {"a": "b"}
    assert (whole["kind"], "managedFields" in whole["metadata"]) == (KIND, False)
    deployment = trim(
        "Deployment", {**service, "spec": {"replicas": 1, "template": {}}, "status": {"replicas": 1}}
    )
    assert deployment["spec"] == {"replicas": 1}
    assert set(trim("ConfigMap", {**service, "data": {"a": "b"}})) == {"metadata"}


def test_what_an_operator_writes_itself_is_no_news() -> None:
    old = {"metadata": {"generation": 1}, "status": {"replicas": 1}}
    assert not is_news(KIND, old, {**old, "status": {"replicas": 2}})
    assert is_news(KIND, old, {**old, "metadata": {"generation": 2}})
    assert is_news(KIND, old, {**old, "metadata": {"generation": 1, "deletionTimestamp": "now"}})
    assert is_news(KIND, None, old)
    assert is_news("Pod", old, {**old, "status": {"replicas": 2}})
    assert not is_news("Pod", old, {**old, "metadata": {"generation": 1, "annotations": {"cost": "1"}}})
    assert not is_news("Deployment", old, {**old, "status": {"replicas": 2}})
    assert not is_news("Deployment", None, old)
    assert is_news(CLAIM, old, {**old, "status": {"phase": "Bound"}})
    assert not is_news(CACHE_KIND, old, {**old, "status": {"fetched": {}}})
    assert is_news(CACHE_KIND, None, old)


class OfNamespacesApi(ToldApi):
    """Lists what is in the namespace asked for; some may not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: set[str] = set()

    async def list_all(
        self, kind: str, namespace: str, labels: str, *, is_bare: bool, kept: Callable[[Json], Json]
    ) -> Any:
        if namespace in self.forbidden:
            raise ForbiddenError(f"pods in {namespace}: 403")
        found = [item for item in self.items if item["metadata"]["namespace"] == namespace]
        return tuple(map(kept, found)), "10"


async def test_each_of_several_namespaces_is_current_by_itself(eventually: Callable[..., Any]) -> None:
    api: Any = OfNamespacesApi()
    api.items, api.forbidden = [pod("a", 3), pod("b", 4)], {"search"}
    api.items[1]["metadata"]["namespace"] = "chat"
    cache = KubernetesCache(api, ("team", "chat", "search"), {"Pod": ""})
    task = asyncio.create_task(cache.run())
    await cache.tried(10.0)
    for namespace, want in (("team", ["a"]), ("chat", ["b"]), ("search", None), ("other", None)):
        held = cache.objects("Pod", ServiceKey(namespace, "demo"))
        assert (held if held is None else [item["metadata"]["name"] for item in held]) == want, namespace
        assert cache.get("Pod", namespace, "none") == (want is not None, None)
    assert cache.current_kinds() == set(), "it is not, everywhere"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_kind_that_the_cluster_lacks_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> None:
    """Nobody has a right to it there, and what is refused stands in the audit log."""
    monkeypatch.setattr(kubernetes_cache, "ABSENT_RETRY_SECONDS", 0.01)
    api: Any = ToldApi()
    served: set[str] = set()

    async def served_kinds(version: str) -> frozenset[str]:
        assert version == "leaderworkerset.x-k8s.io/v1"
        return frozenset(served)

    api.served_kinds = served_kinds
    cache = KubernetesCache(api, (), {"LeaderWorkerSet": "managed=yes"})
    running = asyncio.create_task(cache.run())
    try:
        await cache.tried(5.0)
        await asyncio.sleep(0.05)
        assert (api.lists, cache.current_kinds()) == (0, set())
        served.add("LeaderWorkerSet")
        await eventually(lambda: cache.current_kinds() == {"LeaderWorkerSet"})
    finally:
        running.cancel()
