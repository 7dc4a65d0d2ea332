"""Whether the gate is open, by what was judged before, what is being judged, and what is asked for."""

import json
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.manifests import render
from headway_operator.quality import Gate, gated, open_or_shut
from headway_operator.quality.judged import judged_hash
from headway_operator.quality.judgement import as_status, recorded
from headway_operator.spec import parse
from headway_operator.state import ChildKey, Evaluation, Observed, Rendered

NOW = 1_800_000_000.0
IMAGE = "example.test/runtime:1"
CHECK = {
    "name": "mean KL divergence",
    "value": 0.0002,
    "limit": 0.01,
    "unit": "nats",
    "passed": True,
    "note": "",
}


def output(**changes: Any) -> str:
    verdict = {
        "schema_version": 1,
        "passed": True,
        "checks": [CHECK],
        "text": None,
        "tasks": [],
        "left_out": 0,
    }
    return json.dumps(verdict | changes)


class Judge:
    """A quantized service with a gate; each test changes something."""

    def __init__(self, build: Any) -> None:
        self.build = build
        self.spec: dict[str, Any] = {"quantization": "int8", "quality": {}}
        self.status: dict[str, Any] = {}
        self.evaluations: tuple[Evaluation, ...] = ()
        self.digests: dict[str, str] = {}
        self.image = IMAGE

    def gate(self) -> Gate:
        service = parse({**self.build.manifest(self.spec), "status": self.status})
        observed = Observed(evaluations=self.evaluations)
        gate = open_or_shut(service, self.image, observed, self.digests, NOW)
        assert gate is not None
        return gate

    def ends(self, phase: Any = "ended", **changes: Any) -> Gate:
        """The evaluation ends; status keeps what the gate says of it, and the Job goes."""
        self.evaluations = (Evaluation(self.gate().job, phase, **changes),)
        gate = self.gate()
        self.remember(gate)
        return gate

    def remember(self, gate: Gate) -> None:
        self.status = {**self.status, "quality": {"history": [as_status(one) for one in gate.history]}}


@pytest.fixture
def judge(build: Any) -> Judge:
    return Judge(build)


def told(gate: Gate) -> tuple[str, str]:
    return gate.status, gate.reason


def test_there_is_no_gate_where_none_is_asked_for(build: Any) -> None:
    assert open_or_shut(parse(build.manifest()), IMAGE, Observed(), {}, NOW) is None


def test_what_nobody_has_judged_is_judged_now(judge: Judge) -> None:
    gate = judge.gate()
    assert told(gate) == ("Unknown", "Verifying")
    assert (gate.begins, gate.is_open, gate.job) == (True, False, f"demo-quality-{gate.hash}")


@pytest.mark.parametrize(
    ("phase", "message"), [("pending", "Unschedulable: no node has a GPU"), ("running", "")]
)
def test_one_on_its_way_is_waited_for_and_its_cause_told(judge: Judge, phase: Any, message: str) -> None:
    judge.evaluations = (Evaluation(judge.gate().job, phase, message),)
    gate = judge.gate()
    assert (told(gate), gate.begins) == (("Unknown", "Verifying"), False)
    assert gate.message == f"{gate.job} is {phase}" + (f": {message}" if message else "")


def test_a_verdict_is_told_with_its_numbers_and_is_news_once(judge: Judge) -> None:
    gate = judge.ends(output=output())
    assert told(gate) == ("True", "Passed")
    assert gate.message == "mean KL divergence 0.0002 nats, at most 0.01 nats"
    assert (gate.is_news, gate.is_open) == (True, True)
    again = judge.gate()
    assert (told(again), again.is_news) == (("True", "Passed"), False)
    assert again.judgement == gate.judgement


def test_a_failure_names_what_failed_first(judge: Judge) -> None:
    drop = {"name": "accuracy drop, x", "value": 12.5, "limit": 2, "unit": "points", "passed": False}
    share = {"name": "perplexity increase", "value": "nan", "limit": 0.02, "unit": "share", "passed": False}
    gate = judge.ends(
        output=output(
            passed=False, checks=[CHECK, drop, share | {"note": "logits are not finite"}], left_out=2
        )
    )
    assert (told(gate), gate.is_stuck) == (("False", "Failed"), True)
    assert gate.message == (
        "accuracy drop, x 12.5 points, above the limit of 2.0 points; perplexity increase not finite, above "
        "the limit of 2.00% (logits are not finite); mean KL divergence 0.0002 nats, at most 0.01 nats; "
        "2 more checks"
    )


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_outlives_its_job(judge: Judge, passed: bool) -> None:  # noqa: FBT001 - a parameter
    first = judge.ends(output=output(passed=passed))
    judge.evaluations = ()
    gate = judge.gate()
    assert (gate.reason, gate.begins, gate.message) == (first.reason, False, first.message)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        pytest.param(
            {
                "message": "exited with status 2; last line: could not judge: no network",
                "output": "no network",
            },
            "JobFailed",
            "could not judge: no network",
            id="it came to no verdict",
        ),
        pytest.param(
            {"output": output(schema_version=2)}, "JobFailed", "left no verdict", id="another version"
        ),
        pytest.param({"output": output()[:50]}, "JobFailed", "left no verdict", id="half a verdict"),
        pytest.param(
            {"phase": "timed_out"}, "TimedOut", "within 3600 s (spec.quality.timeout", id="too long"
        ),
    ],
)
def test_without_a_verdict_deleting_the_job_asks_for_another(
    judge: Judge, changes: dict[str, Any], reason: str, words: str
) -> None:
    gate = judge.ends(**changes)
    assert (gate.status, gate.reason, gate.is_open) == ("False", reason, False)
    assert words in gate.message
    assert f"delete the Job {gate.job}" in gate.message
    assert (judge.gate().reason, judge.gate().begins) == (reason, False)
    judge.evaluations = ()
    assert judge.gate().begins


def test_a_verdict_that_was_lost_is_asked_for_again(judge: Judge) -> None:
    gate = judge.ends("lost", message="its pod is gone")
    assert (told(gate), gate.is_stuck, gate.begins) == (("Unknown", "VerdictLost"), False, False)
    assert gate.is_under_way
    assert "its pod is gone and the verdict with it; the Job is deleted to run again" in gate.message
    assert (gate.job, gate.judgement) == ("", None)  # no Job is kept, and nothing is remembered
    judge.evaluations = ()
    assert (judge.gate().reason, judge.gate().begins) == ("Verifying", True)


def test_time_that_ran_out_tells_what_was_seen_last(judge: Judge) -> None:
    seen = {
        "type": "QualityVerified",
        "status": "Unknown",
        "reason": "Verifying",
        "message": "no node has a GPU",
    }
    judge.status = {"conditions": [seen]}
    assert "; last seen: no node has a GPU; " in judge.ends("timed_out").message


def test_a_file_that_is_not_there_is_waited_for(judge: Judge) -> None:
    judge.spec["quality"] = {"text": "configmap://judge/a.jsonl"}
    gate = judge.gate()
    assert (told(gate), gate.begins, gate.is_stuck) == (("Unknown", "FileMissing"), False, True)
    assert "'configmap://judge/a.jsonl' is not there" in gate.message
    judge.digests = {"configmap://judge/a.jsonl": "1"}
    assert judge.gate().begins


def test_nothing_is_begun_while_no_replica_is_wanted(judge: Judge) -> None:
    judge.spec["replicas"] = 0
    assert (told(judge.gate()), judge.gate().begins) == (("Unknown", "ScaledToZero"), False)
    judge.evaluations = (Evaluation(judge.gate().job, "running"),)
    assert judge.gate().reason == "Verifying"


@pytest.mark.parametrize(
    ("spec", "is_judged"),
    [
        pytest.param({}, False, id="plain without levers"),
        pytest.param({"quantization": "auto"}, True, id="perhaps a quantized checkpoint"),
        pytest.param({"kvCacheDtype": "auto"}, True, id="perhaps one that asks for a KV cache of 8 bits"),
        pytest.param({"kvCacheDtype": "int8"}, True, id="a KV lever"),
        pytest.param({"speculative": {"method": "ngram"}}, True, id="speculation"),
        pytest.param({"quality": {"baseline": {"source": "/b"}}}, True, id="another baseline"),
    ],
)
def test_a_model_that_is_its_own_baseline_needs_no_judge(
    judge: Judge,
    spec: dict[str, Any],
    is_judged: bool,  # noqa: FBT001 - a parameter
) -> None:
    judge.spec |= {"quantization": "none", "kvCacheDtype": "bfloat16", **spec}
    assert judge.gate().begins == is_judged
    assert judge.gate().is_open != is_judged


# What is judged: (a change of the spec, whether it is judged anew).
CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "weights": ({"quantization": "fp8"}, True),
    "source": ({"model": {"source": "/m"}}, True),
    "context": ({"model": {"source": "bundled://headway-tiny", "maxModelLen": 512}}, True),
    "KV": ({"kvCacheDtype": "int8"}, True),
    "dtype": ({"dtype": "float32"}, True),
    "device": ({"device": "cuda"}, True),
    "limits": ({"quality": {"thresholds": {"maxKl": "0.02"}}}, True),
    "baseline": ({"quality": {"baseline": {"source": "/b"}}}, True),
    "node": ({"template": {"spec": {"nodeSelector": {"gpu": "l4"}}}}, True),
    "name": ({"model": {"source": "bundled://headway-tiny", "servedName": "x"}}, False),
    "targets": ({"slo": {"ttftMilliseconds": 1}}, False),
    "scaling": ({"scaling": {"maxReplicas": 2}}, False),
    "batching": ({"batching": {"maxNumSeqs": {"max": 8}}}, False),
    "drain": ({"drainTimeoutSeconds": 5}, False),
    "weights without loss": ({"weightCompression": "none"}, False),
    "what memory may not hold": ({"memoryCheck": "Warn"}, False),
    "prefix cache": ({"prefixCaching": False}, False),
    "resources": ({"resources": {"limits": {"cpu": 2}}}, False),
    "time": ({"quality": {"timeoutSeconds": 60, "resources": {"limits": {"cpu": 2}}}}, False),
    "labels": ({"template": {"metadata": {"labels": {"a": "b"}}, "spec": {}}}, False),
}


@pytest.mark.parametrize(("change", "is_new"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_judged_anew_when_it_can_change_an_answer(
    judge: Judge,
    change: dict[str, Any],
    is_new: bool,  # noqa: FBT001 - a parameter
) -> None:
    if "template" in change:
        judge.spec["template"] = {"spec": {}}
    before = judge.gate().hash
    judge.spec |= change
    assert (judge.gate().hash != before) == is_new


def test_another_image_or_another_text_is_judged_anew(judge: Judge) -> None:
    judge.spec["quality"] = {"text": "configmap://judge/a"}
    judge.digests = {"configmap://judge/a": "1"}
    spec = parse(judge.build.manifest(judge.spec)).spec
    hashes = {judged_hash(spec, image, {"a": digest}) for image in "xy" for digest in "12"}
    assert len(hashes) == 4
    before = judge.gate().hash
    judge.digests = {"configmap://judge/a": "2"}
    assert judge.gate().hash != before


def test_the_way_back_needs_no_second_judgement_but_memory_has_an_end(judge: Judge) -> None:
    judge.ends(output=output())
    for length in range(100, 107):
        judge.spec["model"] = {"source": "/m", "maxModelLen": length}
        judge.ends(output=output(passed=False))
    judge.evaluations, judge.spec["model"] = (), {"source": "bundled://headway-tiny"}
    back = judge.gate()
    assert (told(back), len(back.history), back.history[0].reason) == (("True", "Passed"), 8, "Passed")
    judge.remember(back)
    judge.spec["model"] = {"source": "/m", "maxModelLen": 107}
    judge.ends(output=output())
    judge.evaluations, judge.spec["model"] = (), {"source": "/m", "maxModelLen": 100}
    assert judge.gate().begins  # the one that was used longest ago
    judge.spec["model"] = {"source": "bundled://headway-tiny"}
    assert told(judge.gate()) == ("True", "Passed")


def test_a_record_that_cannot_be_read_was_not_judged() -> None:
    good = {"hash": "1", "reason": "Passed", "message": "", "finishedAt": "2026-01-01T00:00:00Z"}
    status = {"quality": {"history": [{"hash": "2"}, good, {**good, "reason": "Perhaps"}]}}
    assert [one.hash for one in recorded(status)] == ["1"]


def children(rendered: Rendered) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in rendered.manifests}


class Rollout:
    """What is applied and kept of a change, with or without something that serves."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.existing: frozenset[ChildKey] = frozenset()

    def serve(self) -> str:
        """What is asked for is what serves."""
        rendered = self.rendered()
        pin = rendered.revision
        self.judge.status["revision"] = {
            "name": pin.name,
            "hash": pin.hash,
            "runtimeImage": pin.runtime_image,
            "gatewayImage": pin.gateway_image,
            "gatewayHash": pin.gateway_hash,
            "specHash": pin.spec_hash,
        }
        self.existing = frozenset((ChildKey("Deployment", pin.name), ChildKey("Deployment", "demo-gateway")))
        return pin.name

    def rendered(self) -> Rendered:
        service = parse({**self.judge.build.manifest(self.judge.spec), "status": self.judge.status})
        return render(service, self.judge.build.site(), "PEM", self.existing)

    def gated(self) -> Rendered:
        service = parse({**self.judge.build.manifest(self.judge.spec), "status": self.judge.status})
        site = self.judge.build.site()
        return gated(service, site, self.rendered(), self.judge.gate(), self.existing)


@pytest.fixture
def rollout(judge: Judge) -> Rollout:
    return Rollout(judge)


def test_the_first_revision_is_withheld_and_the_rest_is_made(rollout: Rollout) -> None:
    result, whole = rollout.gated(), rollout.rendered()
    job = rollout.judge.gate().job
    assert children(result) == children(whole) - {("Deployment", whole.revision.name)} | {("Job", job)}
    assert (result.withheld, result.serves_nothing) == (whole.revision.name, True)
    assert ChildKey("Deployment", whole.revision.name) not in result.keep


def test_what_serves_is_kept_with_its_gateway_while_its_successor_waits(rollout: Rollout) -> None:
    serving = rollout.serve()
    rollout.judge.spec |= {"quantization": "fp8", "drainTimeoutSeconds": 5}
    result, whole = rollout.gated(), rollout.rendered()
    assert (result.revision.name, result.withheld) == (serving, whole.revision.name)
    assert not any(kind == "Deployment" for kind, _ in children(result))
    assert {ChildKey("Deployment", serving), ChildKey("Deployment", "demo-gateway")} <= result.keep
    assert not result.serves_nothing


def test_a_gate_before_what_serves_already_takes_nothing_away(rollout: Rollout) -> None:
    serving = rollout.serve()
    rollout.judge.spec["quality"] = {"thresholds": {"maxKl": "0.0001"}}
    rollout.judge.ends(output=output(passed=False))
    result = rollout.gated()
    assert (result.revision.name, result.withheld) == (serving, "")
    assert ("Deployment", serving) in children(result)


def test_what_serves_is_not_withheld_when_its_status_is_lost(rollout: Rollout) -> None:
    serving = rollout.serve()
    rollout.judge.status = {}
    assert (rollout.gated().revision.name, rollout.gated().withheld) == (serving, "")


def test_an_older_revision_that_is_on_its_way_out_is_withheld_like_any_other(rollout: Rollout) -> None:
    older = rollout.serve()
    rollout.judge.spec["quantization"] = "fp8"
    serving = rollout.serve()
    rollout.existing |= {ChildKey("Deployment", older)}
    rollout.judge.spec["quantization"] = "int8"
    assert (rollout.gated().revision.name, rollout.gated().withheld) == (serving, older)


def test_a_job_is_made_once_and_kept_while_its_subject_is_asked_for(rollout: Rollout) -> None:
    job = rollout.judge.gate().job
    assert ("Job", job) in children(rollout.gated())
    rollout.judge.evaluations = (Evaluation(job, "running"),)
    result = rollout.gated()
    assert ("Job", job) not in children(result)
    assert ChildKey("Job", job) in result.keep
    rollout.judge.spec["quantization"] = "fp8"
    assert ChildKey("Job", job) not in rollout.gated().keep


def test_an_open_gate_changes_nothing_of_what_is_rendered(rollout: Rollout) -> None:
    gate = rollout.judge.ends(output=output())
    result, whole = rollout.gated(), rollout.rendered()
    assert replace(result, keep=frozenset()) == replace(whole, keep=frozenset())
    assert result.keep == whole.keep | {ChildKey("Job", gate.job)}
