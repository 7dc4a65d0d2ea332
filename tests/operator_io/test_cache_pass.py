"""One pass over a ModelCache, with its cluster in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from headway_operator import cache_pass, model_cache, names
from headway_operator.model_cache import Claim, ObservedCache
from headway_operator.passes import Carried
from headway_operator.spec import ModelCache
from headway_operator.state import ChildKey, ServiceKey, Site

SITE = Site("kubernetes", "runtime:1", "gateway:1", "/etc/headway/admin/public.pem", (), 8000)
NOW = 1_800_000_000.0


@dataclass
class MemoryCaches:
    """One cache, whose claim is bound."""

    site: Site = SITE
    children: set[ChildKey] = field(default_factory=set)
    status: Mapping[str, Any] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)

    async def observe(self, cache: ModelCache) -> ObservedCache:
        claim = Claim("llama-model-cache", "claim-1", "Bound")
        return ObservedCache(claim, children=frozenset(self.children))

    async def apply(self, key: ServiceKey, manifest: dict[str, Any]) -> None:
        self.children.add(ChildKey(manifest["kind"], manifest["metadata"]["name"]))

    async def prune(self, key: ServiceKey, child: ChildKey) -> None:
        self.children.remove(child)

    def declared(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        return status

    async def write_status(self, key: ServiceKey, status: Mapping[str, Any]) -> None:
        self.status = status

    async def emit(
        self, key: ServiceKey, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        self.events.append((kind, reason))

    async def step(self, carried: Carried, **spec: Any) -> dict[str, str]:
        """One pass; what the conditions say: type -> reason."""
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": "ModelCache",
            "metadata": {"name": "llama", "namespace": "team", "uid": "u", "generation": 1},
            "spec": {"source": "hf://a/b", "storage": {"size": "1Gi"}, **spec},
            "status": self.status,
        }
        await cache_pass.take_cache_pass(self, lambda: NOW, manifest, carried)
        return {one["type"]: one["reason"] for one in self.status["conditions"]}


async def test_a_template_of_a_wrong_shape_is_told_with_its_field() -> None:
    caches = MemoryCaches()
    told = await caches.step(Carried(), template={"spec": {"securityContext": "x"}})
    assert told == {"Ready": "InvalidSpec", "Degraded": "InvalidSpec"}
    assert (
        "spec.template.spec.securityContext: 'x' is not an object"
        in caches.status["conditions"][0]["message"]
    )


async def test_a_defect_is_told_and_logged_once_and_what_there_is_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caches, carried = MemoryCaches(), Carried()
    assert (await caches.step(carried))["Ready"] == "Fetching"
    children = set(caches.children)

    def fail(*_: Any) -> None:
        raise KeyError("name")

    monkeypatch.setattr(model_cache, "course_of", fail)
    for _ in range(3):
        assert await caches.step(carried) == {"Ready": "InternalError", "Degraded": "InternalError"}
    assert caches.children == children
    assert caches.events.count(("Warning", "InternalError")) == 1
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert said.exc_info is not None
    monkeypatch.undo()
    assert await caches.step(carried) == {"Ready": "Fetching", "Degraded": "AsExpected"}
