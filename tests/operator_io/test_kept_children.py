"""A workload that is kept and not rendered stays as it was applied, on an API that is told what to say."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_applied import REAPPLY_SECONDS
from headway_operator.errors import FieldConflictError
from headway_operator.manifests import render
from headway_operator.names import KIND, LAST_APPLIED_ANNOTATION, ChildKey, ServiceKey
from headway_operator.spec import parse
from headway_operator.state import Site

Stage = Any  # of conftest.py
Json = dict[str, Any]
FORGED = "metadata.name"


class ToldApi:
    """Has one Deployment; notes what is asked and written. is_contested: others set its fields."""

    def __init__(self) -> None:
        self.item: Json | None = None
        self.calls: list[str] = []
        self.is_contested = False

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        self.calls.append("get")
        return copy.deepcopy(self.item) if kind == "Deployment" else {"metadata": {"uid": "u1"}}

    async def apply(self, manifest: Mapping[str, Any], *, force: bool, subresource: str = "") -> Any:
        self.calls.append("force" if force else "apply")
        if self.is_contested and not force:
            raise FieldConflictError("set by rival", ("rival",), (".spec.template",))
        generation = 1 if self.item is None else self.item["metadata"]["generation"] + 1
        written: Json = copy.deepcopy(dict(manifest))
        written["metadata"] |= {"generation": generation}
        self.item = written
        return copy.deepcopy(written)

    def change(self, image: str = "other:1") -> None:
        assert self.item is not None
        self.item["spec"]["template"]["spec"]["containers"][0]["image"] = image
        self.item["metadata"]["generation"] += 1

    def image(self) -> str:
        assert self.item is not None
        return str(self.item["spec"]["template"]["spec"]["containers"][0]["image"])

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Memory:
    """What a cluster keeps of that Deployment, current at once."""

    def __init__(self, api: ToldApi) -> None:
        self.api = api

    def get(self, kind: str, namespace: str, name: str) -> tuple[bool, Json | None]:
        return kind == "Deployment", self.api.item if kind == "Deployment" else None


class Kept:
    """A Deployment that an operator has applied, and another one, by its checkpoint, that keeps it."""

    def __init__(self, key: ServiceKey, manifest: Json) -> None:
        self.api, self.key, self.manifest = ToldApi(), key, manifest
        self.child = ChildKey("Deployment", manifest["metadata"]["name"])
        self.now = 1_800_000_000.0
        self.cluster = self.start()

    def start(self, **options: Any) -> KubernetesCluster:
        api, cache = self.api, Memory(self.api)
        told: Any = {"cache": cache, "clock": lambda: self.now, **options}
        self.cluster = KubernetesCluster(api, runtime_image="", gateway_image="", **told)  # type: ignore[arg-type]
        return self.cluster

    async def apply(self) -> None:
        await self.cluster.fetch(self.key)
        await self.cluster.apply(self.key, self.manifest)
        self.api.taken()

    async def repair(self, seconds: float = REAPPLY_SECONDS + 1) -> list[str]:
        """The calls that it takes, so much later."""
        self.now += seconds
        await self.cluster.repair(self.key, self.child)
        return self.api.taken()


@pytest.fixture
async def kept(stage: Stage, key: ServiceKey) -> Kept:
    site: Site = stage.cluster.site
    rendered = render(parse(stage.manifest), site, "key", frozenset())
    (manifest,) = (one for one in rendered.manifests if one["metadata"]["name"] == rendered.revision.name)
    one = Kept(key, manifest)
    await one.apply()
    return one


async def test_what_nobody_touched_is_not_even_read(kept: Kept) -> None:
    for seconds in (1.0, 100.0, 1000.0):
        assert await kept.repair(seconds) == []


async def test_a_change_is_undone_within_a_minute_with_one_write(kept: Kept) -> None:
    before, written = kept.api.image(), copy.deepcopy(kept.api.item)
    kept.api.change()
    assert await kept.repair(1.0) == []
    assert await kept.repair(REAPPLY_SECONDS) == ["get", "apply"]
    assert kept.api.image() == before
    assert kept.api.item is not None
    assert written is not None
    assert kept.api.item["spec"] == written["spec"]
    assert kept.api.item["metadata"]["annotations"] == written["metadata"]["annotations"]
    assert await kept.repair() == []


async def test_another_scale_is_looked_at_once_and_changes_nothing(kept: Kept) -> None:
    assert kept.api.item is not None
    kept.api.item["spec"]["replicas"] = 7
    kept.api.item["metadata"]["generation"] += 1
    assert await kept.repair() == ["get"]
    assert await kept.repair() == []
    assert kept.api.item["spec"]["replicas"] == 7


async def test_a_change_of_the_labels_is_undone_too(kept: Kept) -> None:
    assert kept.api.item is not None
    kept.api.item["metadata"]["labels"]["app.kubernetes.io/name"] = "mine"
    assert await kept.repair() == ["get", "apply"]
    assert kept.api.item["metadata"]["labels"]["app.kubernetes.io/name"] == "headway"


async def test_a_rival_is_not_fought_over_it(kept: Kept) -> None:
    kept.api.is_contested = True
    kept.api.change()
    assert await kept.repair() == ["get", "apply", "force"]
    kept.api.change()
    for _ in range(2):
        with pytest.raises(FieldConflictError, match=r"rival set \.spec\.template of Deployment"):
            await kept.repair()
        assert kept.api.taken() == ["get", "apply"]
        assert kept.api.image() == "other:1"


async def test_an_operator_that_starts_goes_by_the_checkpoint(kept: Kept) -> None:
    rows = kept.cluster._applied.to_json(kept.key, besides=ChildKey("ConfigMap", ""))
    kept.start()
    kept.cluster._applied.resume(kept.key, rows)
    assert await kept.repair(0.0) == []
    kept.api.change()
    kept.start()
    kept.cluster._applied.resume(kept.key, rows)
    assert await kept.repair(0.0) == ["get", "get", "apply"]  # the service's uid first
    assert kept.api.image() != "other:1"


async def test_an_operator_without_a_checkpoint_looks_once(kept: Kept) -> None:
    kept.start()
    assert await kept.repair() == ["get", "get"]
    assert await kept.repair() == []
    kept.cluster._owned[kept.key] = {kept.child: "u1"}
    await kept.cluster.apply(kept.key, kept.manifest)
    assert kept.api.taken() == [], "what was looked at and found right need not be written to be rendered"


async def test_what_an_earlier_version_wrote_is_left_until_it_is_applied_again(kept: Kept) -> None:
    assert kept.api.item is not None
    del kept.api.item["metadata"]["annotations"]
    kept.api.change()
    assert await kept.repair() == ["get"]
    assert await kept.repair() == []
    assert kept.api.image() == "other:1"
    kept.cluster._owned[kept.key] = {kept.child: "u1"}
    await kept.cluster.apply(kept.key, kept.manifest)
    assert kept.api.taken() == ["apply"], "nobody has said that it was as it is to be"
    assert LAST_APPLIED_ANNOTATION in kept.api.item["metadata"]["annotations"]


async def test_an_annotation_about_another_object_is_told_and_not_written(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    other = Kept(kept.key, {**kept.manifest, "metadata": {**kept.manifest["metadata"], "name": "victim"}})
    await other.apply()
    assert kept.api.item is not None
    assert other.api.item is not None
    kept.api.item["metadata"]["annotations"] = other.api.item["metadata"]["annotations"]
    kept.api.change()
    with caplog.at_level(logging.WARNING):
        assert await kept.repair() == ["get"]
        assert await kept.repair() == []
    assert kept.api.image() == "other:1"
    (record,) = caplog.records
    assert "is left as it is" in record.message
    assert FORGED in record.message


@pytest.mark.parametrize(
    "metadata",
    [
        {"deletionTimestamp": "2026-01-02T03:04:05Z"},
        {"ownerReferences": [{"kind": KIND, "uid": "other", "controller": True}]},
    ],
    ids=["going", "of another service"],
)
async def test_one_that_is_going_or_anothers_is_left_alone(kept: Kept, metadata: Json) -> None:
    assert kept.api.item is not None
    kept.api.item["metadata"] |= metadata
    kept.api.change()
    assert await kept.repair() == ["get"]
    kept.api.item = None
    assert await kept.repair() == ["get"]
