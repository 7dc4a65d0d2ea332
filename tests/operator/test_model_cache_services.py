"""Services whose model is in a ModelCache: what they read, what makes them roll, what they say it lacks."""

import dataclasses
from typing import Any

import pytest
from tests.operator.model_caches import BOUND, SMALLEST, filled, manifest

from headway_operator import model_cache
from headway_operator.manifests import render
from headway_operator.model_cache.offer import uses
from headway_operator.spec import parse


def service(build: Any, **spec: Any) -> Any:
    return parse(build.manifest({"model": {"source": "cache://llama"}, "replicas": 2, **spec}))


def test_a_service_reads_the_folder_on_the_claim(build: Any) -> None:
    status = filled(SMALLEST, build)
    asked = service(
        build,
        speculative={"draft": {"source": "cache://llama"}},
        lora={"adapters": [{"name": "sql", "source": "cache://llama"}]},
        quality={"baseline": {"source": "cache://llama"}},
    )
    assert model_cache.caches_used(asked.spec) == ("llama",)
    resolved, lack = model_cache.with_caches(asked, {"llama": manifest(status=status)})
    assert lack is None
    assert model_cache.caches_used(resolved.spec) == ()
    result = render(resolved, build.site(operator_namespace="system"), "PEM", frozenset())
    deployment = next(m for m in result.manifests if m["metadata"]["name"] == result.revision.name)
    pod = deployment["spec"]["template"]["spec"]
    claims = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"claimName": BOUND.name, "readOnly": True}]
    (container,) = pod["containers"]
    assert container["args"][1] == "/mnt/models/s3--models--1/snapshots/0a1b"
    assert [m["readOnly"] for m in container["volumeMounts"] if m["name"] == "model"] == [True]
    policy = next(m for m in result.manifests if m["kind"] == "NetworkPolicy")
    assert policy["spec"]["egress"] == []  # nothing is fetched by replicas


def test_other_content_rolls_a_service_and_an_upgrade_does_not(build: Any) -> None:
    asked, status = service(build), filled(SMALLEST, build)

    def revision(fetched: dict[str, Any], **site: Any) -> Any:
        pinned = dataclasses.replace(asked, status={"revision": pin} if pin else {})
        resolved, _ = model_cache.with_caches(pinned, {"llama": manifest(status={"fetched": fetched})})
        return render(resolved, build.site(**site), "PEM", frozenset()).revision

    pin: dict[str, str] = {}
    before = revision(status["fetched"])
    pin = {
        "name": before.name,
        "hash": before.hash,
        "runtimeImage": before.runtime_image,
        "gatewayImage": before.gateway_image,
        "gatewayHash": before.gateway_hash,
        "specHash": before.spec_hash,
    }
    # Fetched once more to the same end, by a newer operator with a newer image.
    again = {**status["fetched"], "key": "another", "fetchedAt": "2027-02-02T00:00:00Z", "seconds": 1.0}
    assert revision(again, runtime_image="example.test/runtime:2") == before
    other = {**status["fetched"], "path": "s3--models--1/snapshots/ffff", "identity": "ffff"}
    assert revision(other).hash != before.hash


@pytest.mark.parametrize(
    ("status", "reason", "words", "is_stuck"),
    [
        (None, "ModelCacheMissing", "make it, or change the source", True),
        ({}, "ModelCacheFetching", "has not looked at it yet", False),
        (("Fetching", "x runs: 25%"), "ModelCacheFetching", "llama: Fetching: x runs: 25%", False),
        (("ClaimPending", "no volume"), "ModelCacheFetching", "ClaimPending: no volume", False),
        (("SourceRefused", "no right"), "ModelCacheFailed", "SourceRefused: no right", True),
        (("Suspended", "it is"), "ModelCacheFailed", "Suspended: it is", True),
    ],
)
def test_a_service_says_what_its_cache_lacks(
    build: Any,
    status: Any,
    reason: str,
    words: str,
    is_stuck: bool,  # noqa: FBT001 - a row of a table
) -> None:
    if isinstance(status, tuple):
        ready = {"type": "Ready", "status": "False", "reason": status[0], "message": status[1]}
        status = {"conditions": [ready]}
    found = None if status is None else manifest(status=status)
    asked = service(build)
    same, lack = model_cache.with_caches(asked, {"llama": found})
    assert same is asked
    assert lack is not None
    assert (lack.reason, lack.is_stuck) == (reason, is_stuck)
    assert words in lack.message


def test_who_uses_a_cache_is_seen_in_what_anybody_wrote(build: Any) -> None:
    assert uses(build.manifest({"model": {"source": "cache://llama"}}), "llama")
    assert uses(build.manifest({"speculative": {"draft": {"source": "cache://llama"}}}), "llama")
    assert uses(build.manifest({"lora": {"adapters": [{"name": "a", "source": "cache://llama"}]}}), "llama")
    assert not uses(build.manifest({"model": {"source": "cache://llama-2"}}), "llama")
    assert not uses({"spec": None}, "llama")


def test_services_are_woken_by_what_they_can_see(build: Any) -> None:
    done = manifest(status=filled(SMALLEST, build))
    begun = {"conditions": [{"type": "Ready", "status": "False", "reason": "Fetching", "message": "1%"}]}
    further = {"conditions": [{**begun["conditions"][0], "message": "2%"}]}
    assert not model_cache.is_other_offer(manifest(status=begun), manifest(status=further))
    assert model_cache.is_other_offer(manifest(status=further), done)
    assert model_cache.is_other_offer(None, done)
    assert not model_cache.is_other_offer(done, done)
