"""ModelCaches: what is rendered, against golden YAML, what is done as a fetch goes on, what is said of it.

After a wanted change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/operator/test_model_cache.py, then read the diff.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import conditions, model_cache, names
from headway_operator.errors import SpecError
from headway_operator.manifests import render
from headway_operator.manifests.cache_claim import cache_claim
from headway_operator.manifests.fetch_job import CLAIM_MOUNT, fetch_job
from headway_operator.manifests.fetch_policy import fetch_policy
from headway_operator.manifests.restricted import faults
from headway_operator.model_cache import Claim, Course, Fetch, ObservedCache
from headway_operator.model_cache.content import content_key, job_hash
from headway_operator.model_cache.course import RETRY_SECONDS
from headway_operator.model_cache.offer import uses
from headway_operator.model_cache.told import size_text
from headway_operator.spec import ModelCache, parse, parse_cache
from headway_operator.state import ChildKey

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
NOW = 1_800_000_000.0
SMALLEST: dict[str, Any] = {"source": "s3://models/llama", "storage": {"size": "200Gi"}}
FULL: dict[str, Any] = {
    "source": "oci://r.example:5000/llama:8b",
    "credentialsSecretRef": {"name": "login"},
    "refresh": "2026-11",
    "adapter": True,
    "storage": {"size": "1Ti", "storageClassName": "", "accessModes": ["ReadWriteMany"]},
    "scheduling": {
        "nodeSelector": {"pool": "large"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "low",
    },
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    "template": {
        "metadata": {"labels": {names.CACHE_LABEL: "stolen"}, "annotations": {"note": "x"}},
        "spec": {"containers": [{"name": "runtime", "env": [{"name": "HTTPS_PROXY", "value": "http://p"}]}]},
    },
}
SHARED: dict[str, Any] = {
    "source": "hf://org/name",
    "revision": "v1",
    "credentialsSecretRef": {"name": "token"},
    "storage": {"claimName": "shelf"},
    "networkPolicy": {"enabled": False},
}
BOUND = Claim("llama-model-cache", "claim-1", "Bound")
RESULT = {
    "schema_version": 1,
    "folder": f"{CLAIM_MOUNT}/s3--models--1/snapshots/0a1b",
    "identity": "0a1b",
    "bytes": 140_000_000_000,
    "files": 30,
}


def manifest(spec: dict[str, Any] = SMALLEST, status: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": "llama", "namespace": "team", "uid": "0000-uid", "generation": 2},
        "spec": spec,
        "status": status or {},
    }


def cache(
    spec: dict[str, Any] = SMALLEST, status: dict[str, Any] | None = None, **changes: Any
) -> ModelCache:
    return parse_cache(manifest({**spec, **changes}, status))


def children(one: ModelCache, site: Any) -> list[dict[str, Any]]:
    job = fetch_job(one, site, "the-claim", names.fetch_job(one.name, "1a2b3c4d"))
    return [child for child in (cache_claim(one), fetch_policy(one), job) if child is not None]


@pytest.mark.parametrize(("name", "spec"), [("smallest", SMALLEST), ("full", FULL), ("shared", SHARED)])
def test_renders_the_golden_manifests(build: Any, name: str, spec: dict[str, Any]) -> None:
    site = build.site(image_pull_secrets=("mirror",), allows_unrestricted=False)
    got = yaml.safe_dump_all(json.loads(json.dumps(children(cache(spec), site))), sort_keys=True)
    path = GOLDEN / f"model-cache-{name}.yaml"
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        path.write_text(got)
    assert list(yaml.safe_load_all(got)) == list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("spec", [SMALLEST, FULL, SHARED], ids=["smallest", "full", "shared"])
def test_every_child_is_owned_and_its_pod_restricted(build: Any, spec: dict[str, Any]) -> None:
    made = children(cache(spec), build.site())
    for child in made:
        assert names.cache_labels("llama").items() <= child["metadata"]["labels"].items()
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("ModelCache", "llama", "0000-uid")
    template = made[-1]["spec"]["template"]
    assert faults(template) == []
    assert names.fetch_selector("llama").items() <= template["metadata"]["labels"].items()


def test_a_template_that_leaves_the_standard_is_refused(build: Any) -> None:
    escaping = {"spec": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}}
    with pytest.raises(SpecError, match="allow-unrestricted-templates"):
        children(cache(template=escaping), build.site(allows_unrestricted=False))


def test_the_longest_name_leaves_room_for_its_pods() -> None:
    longest = names.fetch_job("a" * names.MAX_NAME_LENGTH, "1" * names.HASH_LENGTH)
    assert len(longest) + len("-x1y2z") <= 63


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"source": "pvc://claim/a"}, "must be one that is fetched"),
        ({"source": "bundled://headway-tiny"}, "must be one that is fetched"),
        ({"revision": "v1"}, "remove revision"),
        ({"source": "hf://a/b@x", "revision": "y"}, "remove revision"),
        ({"storage": {}}, "set either claimName or size"),
        ({"storage": {"claimName": "a", "size": "1Gi"}}, "set either claimName or size"),
        ({"storage": {"claimName": "a", "accessModes": ["ReadWriteMany"]}}, "set size in place of"),
        ({"storage": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}, "set ReadWriteOnce"),
        ({"storage": {"size": "500m"}}, "less than one byte"),
        ({"storage": {"size": "lots"}}, "spec.storage.size"),
        ({"scheduling": {"topology": {}}}, "unknown field"),
        ({"suspended": True}, "did you mean suspend"),
    ],
)
def test_what_cannot_be_honoured_is_named_with_its_remedy(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        cache(**changes)


def test_only_what_is_fetched_makes_another_content_and_only_how_another_job() -> None:
    before = cache(SHARED)
    for change, is_other_content, is_other_job in (
        ({"revision": "v2"}, True, True),
        ({"refresh": "again"}, True, True),
        ({"adapter": True}, True, True),
        ({"credentialsSecretRef": {"name": "other"}}, False, True),
        ({"template": {"metadata": {"annotations": {"a": "b"}}}}, False, True),
        ({"suspend": True}, False, False),
        ({"networkPolicy": {"enabled": True}}, False, False),
    ):
        after = cache(SHARED, **change)
        assert (content_key(before, "u") != content_key(after, "u")) == is_other_content, change
        assert (job_hash(before, "u") != job_hash(after, "u")) == is_other_job, change
    assert content_key(before, "u") != content_key(before, "another life of the claim")


def fetch_of(one: ModelCache, phase: Any, **facts: Any) -> Fetch:
    name = names.fetch_job(one.name, job_hash(one, BOUND.uid))
    return Fetch(name, phase, NOW - 600, **facts)


def course(one: ModelCache, observed: ObservedCache, build: Any, now: float = NOW) -> Course:
    return model_cache.course_of(one, observed, build.site(), now)


def told(one: ModelCache, found: Course, observed: ObservedCache) -> dict[str, Any]:
    return model_cache.status(found, one.status, one.generation, NOW, observed, one)


def condition(status: dict[str, Any], kind: str = "Ready") -> tuple[str, str]:
    return next((c["status"], c["reason"]) for c in status["conditions"] if c["type"] == kind)


def kinds(found: Course) -> list[str]:
    return [one["kind"] for one in found.manifests]


def test_a_cache_is_filled_once_and_stays_so(build: Any) -> None:
    """From nothing: the claim, then the Job, then how far it is, then nothing more to do."""
    one = cache()
    found = course(one, ObservedCache(), build)
    assert (kinds(found), found.ready.reason) == (["PersistentVolumeClaim", "NetworkPolicy"], "ClaimPending")

    # A claim may wait for the pod that uses it first.
    waiting = dataclasses.replace(BOUND, phase="Pending", message="waiting for first consumer")
    found = course(one, ObservedCache(waiting), build)
    assert kinds(found) == ["PersistentVolumeClaim", "NetworkPolicy", "Job"]

    running = fetch_of(one, "running", bytes=35 * 10**9, total_bytes=140 * 10**9)
    observed = ObservedCache(BOUND, (running,), services=("chat",))
    status = told(one, course(one, observed, build), observed)
    assert condition(status) == ("False", "Fetching")
    assert "35.00 of 140.00 GB, 25%" in status["conditions"][0]["message"]
    assert status["progress"] == {
        "bytes": 35 * 10**9,
        "totalBytes": 140 * 10**9,
        "percent": 25,
        "failedAttempts": 0,
    }
    assert (status["display"], status["services"]) == ({"size": "140 GB", "progress": "25%"}, ["chat"])

    done = ObservedCache(BOUND, (fetch_of(one, "done", output=json.dumps(RESULT), ended_at=NOW),))
    found = course(one, done, build)
    status = told(one, found, done)
    assert (condition(status), condition(status, "Degraded")) == (
        ("True", "Fetched"),
        ("False", "AsExpected"),
    )
    assert status["fetched"]["path"] == "s3--models--1/snapshots/0a1b"
    assert (status["fetched"]["identity"], status["fetched"]["seconds"]) == ("0a1b", 600.0)
    assert status["display"] == {"size": "140 GB", "progress": "100%"}
    assert "progress" not in status

    # Jobs go after a day; what is there needs none, whatever else changes of how it would be fetched.
    for change in ({}, {"template": {"metadata": {"annotations": {"a": "b"}}}}):
        found = course(cache(status=status, **change), ObservedCache(BOUND), build)
        assert (found.ready.reason, kinds(found)) == ("Fetched", ["PersistentVolumeClaim", "NetworkPolicy"])


def filled(spec: dict[str, Any], build: Any) -> dict[str, Any]:
    """The status of a cache that has fetched what this spec asks for."""
    one = cache(spec)
    claim = dataclasses.replace(BOUND, name=spec["storage"].get("claimName", BOUND.name))
    observed = ObservedCache(claim, (fetch_of(one, "done", output=json.dumps(RESULT), ended_at=NOW),))
    return told(one, course(one, observed, build), observed)


def test_what_was_fetched_is_served_until_another_revision_is_there(build: Any) -> None:
    status = filled(SMALLEST, build)
    after = cache(status=status, source="s3://models/other")
    found = course(after, ObservedCache(BOUND), build)
    assert (found.ready.reason, kinds(found)[-1]) == ("Fetching", "Job")
    assert found.content is not None
    status = told(after, found, ObservedCache(BOUND))
    assert (condition(status), status["fetched"]["identity"]) == (("False", "Fetching"), "0a1b")
    suspended = cache(status=status, source="s3://models/other", suspend=True)
    found = course(suspended, ObservedCache(BOUND), build)
    assert found.ready.reason == "Suspended"
    assert not any(child.kind == "Job" for child in found.keep)
    assert found.content is not None


@pytest.mark.parametrize("claim", [None, dataclasses.replace(BOUND, uid="claim-2")], ids=["gone", "another"])
def test_what_lay_on_a_claim_that_is_gone_is_fetched_again(build: Any, claim: Claim | None) -> None:
    found = course(cache(status=filled(SMALLEST, build)), ObservedCache(claim), build)
    assert found.content is None
    assert found.ready.status == "False"


def test_a_job_that_gave_up_is_made_again_after_a_while(build: Any) -> None:
    one = cache()
    job = ChildKey("Job", fetch_of(one, "failed").name)
    failed = ObservedCache(BOUND, (fetch_of(one, "failed", message="no network", ended_at=NOW),))
    found = course(one, failed, build, NOW + RETRY_SECONDS - 1)
    assert (found.ready.reason, job in found.keep) == ("FetchFailed", True)
    assert "no network; tried again at 2027-01-15T" in found.ready.message
    found = course(one, failed, build, NOW + RETRY_SECONDS)
    assert (job in found.keep, kinds(found)) == (False, ["PersistentVolumeClaim", "NetworkPolicy"])
    assert kinds(course(one, ObservedCache(BOUND), build))[-1] == "Job"


def test_a_job_whose_result_is_lost_is_made_again_and_an_older_one_is_not_kept(build: Any) -> None:
    one = cache()
    done = fetch_of(one, "done", ended_at=NOW)
    found = course(one, ObservedCache(BOUND, (done,)), build)
    assert (found.ready.reason, ChildKey("Job", done.name) in found.keep) == ("Fetching", False)
    older = dataclasses.replace(done, name="llama-fetch-00000000")
    found = course(one, ObservedCache(BOUND, (older,)), build)
    assert (kinds(found)[-1], ChildKey("Job", older.name) in found.keep) == ("Job", False)


def error(kind: str) -> str:
    return json.dumps({"schema_version": 1, "error": kind, "message": "words of the source"})


def produced(build: Any) -> Iterator[tuple[str, str]]:
    """Each condition with its reason, of every situation that has one."""
    one, secret = cache(), cache(SHARED)
    missing = 'secret "token" not found'
    situations = [
        (one, ObservedCache()),
        (secret, ObservedCache()),
        (one, ObservedCache(dataclasses.replace(BOUND, phase="Pending"), (fetch_of(one, "waiting"),))),
        (one, ObservedCache(dataclasses.replace(BOUND, phase="Lost"), (fetch_of(one, "waiting"),))),
        (one, ObservedCache(BOUND)),
        (cache(suspend=True), ObservedCache(BOUND)),
        (secret, ObservedCache(BOUND, (fetch_of(secret, "waiting", message=missing),))),
        (one, ObservedCache(BOUND, (fetch_of(one, "waiting", reason="FailedMount", message="no"),))),
        (one, ObservedCache(BOUND, (fetch_of(one, "retrying", output=error("ModelFetchError")),))),
        (one, ObservedCache(BOUND, (fetch_of(one, "retrying", output=error("SourceRefusedError")),))),
        (one, ObservedCache(BOUND, (fetch_of(one, "failed", output=error("NoRoomError"), ended_at=NOW),))),
        (one, ObservedCache(BOUND, (fetch_of(one, "done", output=json.dumps(RESULT)),))),
    ]
    for asked, observed in situations:
        status = told(asked, course(asked, observed, build), observed)
        yield from ((c["type"], c["reason"]) for c in status["conditions"])


def documented() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "model-cache.md").read_text().partition("## Reasons")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert all(means.strip() and remedy.strip() for _, _, means, remedy in rows)
    return {reason: set(on.split(", ")) for reason, on, _, _ in rows}


def test_each_reason_can_be_produced_and_has_a_remedy(build: Any) -> None:
    made: dict[str, set[str]] = {}
    for kind, reason in produced(build):
        made.setdefault(reason, set()).add(kind)
    assert made == documented()


def test_causes_of_pods_are_told_as_they_are_of_services(build: Any) -> None:
    one = cache()
    for phase, reason in (
        ("waiting", "Unschedulable"),
        ("waiting", "ImagePullBackOff"),
        ("failed", "OOMKilled"),
    ):
        fetch = fetch_of(one, phase, reason=reason, message="words", ended_at=NOW)
        observed = ObservedCache(BOUND, (fetch,))
        status = told(one, course(one, observed, build), observed)
        assert condition(status) == ("False", reason)
        assert condition(status, "Degraded") == ("True", reason)


def test_events_tell_what_turned_and_each_cause_once(build: Any) -> None:
    one = cache()
    observed = ObservedCache(BOUND, (fetch_of(one, "retrying", output=error("SourceRefusedError")),))
    first = told(one, course(one, observed, build), observed)
    assert [event[:2] for event in model_cache.events({}, first)] == [("Warning", "SourceRefused")]
    assert model_cache.events(first, first) == []
    done = filled(SMALLEST, build)
    assert [event[:2] for event in model_cache.events(first, done)] == [("Normal", "Fetched")]
    problems = conditions.Problems(("apply PersistentVolumeClaim x: exceeded quota",), "AdmissionRefused")
    found = course(one, ObservedCache(), build)
    status = model_cache.status(found, {}, 1, NOW, ObservedCache(), one, problems)
    assert condition(status, "Degraded") == ("True", "AdmissionRefused")
    assert [event[:2] for event in model_cache.events({}, status)] == [
        ("Normal", "ClaimPending"),
        ("Warning", "AdmissionRefused"),
    ]


def test_a_spec_that_is_refused_keeps_what_is_served(build: Any) -> None:
    found = model_cache.refused(filled(SMALLEST, build), SpecError("spec.source", "no"))
    status = model_cache.status(found, {}, 3, NOW)
    assert condition(status) == ("False", "InvalidSpec")
    assert status["fetched"]["identity"] == "0a1b"


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (7_086_584, "7.09 MB"), (140_961_000_000, "141 GB"), (999_600_000_000, "1 TB")],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
