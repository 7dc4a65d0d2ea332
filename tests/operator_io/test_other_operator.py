"""Of two operators with a Lease each, one leaves a service alone until the other has been silent for long."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_trim import trim
from headway_operator.errors import OtherOperatorError
from headway_operator.names import (
    KIND,
    OPERATOR_LABEL,
    OPERATOR_UNTIL_ANNOTATION,
    ServiceKey,
)

Json = dict[str, Any]
COUNTS_SECONDS = 180.0


class Server:
    """An API server with one service and what is applied; memory of it, which may be behind or missing."""

    def __init__(self) -> None:
        self.uid = "u1"
        self.config_map: Json | None = None
        self.remembered: Json | None = None
        self.is_current = True
        self.num_reads = 0
        self.now = 1_800_000_000.0

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        if kind == KIND:
            return {"metadata": {"uid": self.uid}}
        self.num_reads += 1
        return copy.deepcopy(self.config_map)

    async def apply(self, manifest: Mapping[str, Any], *, force: bool, subresource: str = "") -> Any:
        self.config_map = copy.deepcopy(dict(manifest))
        self.tell()
        return manifest

    def tell(self) -> None:
        """What the watch brings."""
        self.remembered = None if self.config_map is None else trim("ConfigMap", self.config_map)

    def operator(self, lease_namespace: str) -> "Operator":
        """One whose Lease is in this namespace."""
        return Operator(self, lease_namespace)


class Remembered:
    """The cache's side of it."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def get(self, kind: str, namespace: str, name: str) -> tuple[bool, Json | None]:
        is_known = kind == "ConfigMap" and self.server.is_current
        return is_known, self.server.remembered if is_known else None


class Operator:
    """One of them, as far as that is about who writes."""

    def __init__(self, server: Server, lease_namespace: str) -> None:
        self.server, told = server, {"cache": Remembered(server), "lease_namespace": lease_namespace}
        api: Any = server
        settings: Any = {"runtime_image": "", "gateway_image": "", "clock": lambda: server.now, **told}
        self.cluster = KubernetesCluster(api, **settings)

    async def is_alone(self, key: ServiceKey) -> bool:
        await self.cluster.fetch(key)
        reads = self.server.num_reads
        try:
            await self.cluster.check_alone(key)
        except OtherOperatorError:
            return False
        finally:
            self.reads = self.server.num_reads - reads
        return True

    async def save(self, key: ServiceKey) -> None:
        memory = {"at": self.server.now}
        await self.cluster.save_memory(key, memory, self.server.now + COUNTS_SECONDS)


@pytest.fixture
def server() -> Server:
    return Server()


async def test_nobody_has_a_service_that_has_no_checkpoint_yet(server: Server, key: ServiceKey) -> None:
    one = server.operator("system")
    assert await one.is_alone(key)
    assert one.reads == 0


async def test_the_other_is_named_and_what_to_do(server: Server, key: ServiceKey) -> None:
    one, other = server.operator("system"), server.operator("laptop")
    await one.save(key)
    await other.cluster.fetch(key)
    reads = server.num_reads
    words = r"in namespace 'system' looks after .* in 'laptop', leaves it alone: have only one of them watch"
    with pytest.raises(OtherOperatorError, match=words):
        await other.cluster.check_alone(key)
    assert server.num_reads == reads, "from memory"


async def test_one_takes_over_when_the_other_has_been_silent(server: Server, key: ServiceKey) -> None:
    one, other = server.operator("system"), server.operator("laptop")
    await one.save(key)
    for _ in range(5):  # as long as it goes on saving
        server.now += COUNTS_SECONDS - 1
        assert not await other.is_alone(key)
        assert await one.is_alone(key)
        await one.save(key)
    server.now += COUNTS_SECONDS + 1
    assert await other.is_alone(key)
    assert other.reads == 1, "before it takes over it asks whether that is still so"
    await other.save(key)
    assert server.config_map is not None
    assert server.config_map["metadata"]["labels"][OPERATOR_LABEL] == "laptop"
    assert await other.is_alone(key)
    assert not await one.is_alone(key), "the one that comes back leaves it to the other"
    server.now += COUNTS_SECONDS + 1
    assert await one.is_alone(key)


async def test_its_own_mark_of_long_ago_is_its_own(server: Server, key: ServiceKey) -> None:
    one = server.operator("system")
    await one.save(key)
    server.now += 10 * COUNTS_SECONDS
    assert await one.is_alone(key)
    assert one.reads == 0


async def test_memory_that_is_behind_takes_nothing_over(server: Server, key: ServiceKey) -> None:
    one, other = server.operator("system"), server.operator("laptop")
    await one.save(key)
    behind = server.remembered
    server.now += COUNTS_SECONDS + 1
    await one.save(key)
    server.remembered = behind  # the watch is silent
    assert not await other.is_alone(key)
    assert other.reads == 1


async def test_without_memory_the_api_server_is_asked(server: Server, key: ServiceKey) -> None:
    one, other = server.operator("system"), server.operator("laptop")
    await one.save(key)
    server.is_current = False
    assert not await other.is_alone(key)
    assert await one.is_alone(key)
    assert (one.reads, other.reads) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda metadata: metadata["labels"].pop(OPERATOR_LABEL), id="of an earlier version"),
        pytest.param(lambda metadata: metadata.pop("annotations"), id="without a time"),
        pytest.param(
            lambda metadata: metadata["annotations"].update({OPERATOR_UNTIL_ANNOTATION: "soon"}), id="no time"
        ),
        pytest.param(
            lambda metadata: metadata["ownerReferences"][0].update(uid="u0"), id="of a service of before"
        ),
    ],
)
async def test_what_does_not_say_who_looks_after_this_service_keeps_nobody_from_it(
    server: Server, key: ServiceKey, change: Any
) -> None:
    await server.operator("system").save(key)
    assert server.config_map is not None
    change(server.config_map["metadata"])
    server.tell()
    assert await server.operator("laptop").is_alone(key)


async def test_an_operator_that_nobody_told_apart_marks_nothing(server: Server, key: ServiceKey) -> None:
    await server.operator("system").save(key)
    nameless = server.operator("")
    assert await nameless.is_alone(key)
    await nameless.save(key)
    assert server.config_map is not None
    assert OPERATOR_LABEL not in server.config_map["metadata"]["labels"]
    assert "annotations" not in server.config_map["metadata"]


def test_memory_keeps_that_annotation_and_no_other() -> None:
    until, large = {OPERATOR_UNTIL_ANNOTATION: "2026-11-01T10:00:00Z"}, {"large": "x" * 1000}
    for kind, annotations, want in (
        ("ConfigMap", until | large, until),
        ("ConfigMap", large, None),
        ("Service", until, None),
        ("Deployment", until, None),
    ):
        kept = trim(kind, {"metadata": {"name": "demo", "annotations": annotations}})
        assert kept["metadata"].get("annotations") == want
