"""ModelCaches: what is done as a fetch goes on, and what is said of it."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.model_caches import (
    BOUND,
    NOW,
    RESULT,
    SHARED,
    SMALLEST,
    cache,
    course,
    fetch_of,
    filled,
    told,
)

from headway_operator import conditions, model_cache
from headway_operator.errors import SpecError
from headway_operator.model_cache import Claim, Course, ObservedCache
from headway_operator.model_cache.course import RETRY_SECONDS
from headway_operator.model_cache.told import size_text
from headway_operator.state import ChildKey

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (7_086_584, "7.09 MB"), (140_961_000_000, "141 GB"), (999_600_000_000, "1 TB")],
)
def test_sizes_have_three_digits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
