"""What is new is judged before it is served: the gate among the steps of a pass."""

from dataclasses import replace
from typing import Any

from prometheus_client import generate_latest

from headway_operator.operator_metrics import OperatorMetrics
from headway_operator.passes import Carried
from headway_operator.state import ServiceKey

Stage = Any  # of conftest.py


async def test_nothing_new_is_served_before_it_is_verified(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    outcome = await stage.settle()
    assert outcome.problems == []
    assert stage.runtime() == {}
    assert (stage.told("QualityVerified"), stage.told("Ready")) == (
        ("Unknown", "Verifying"),
        ("False", "VerifyingQuality"),
    )
    assert stage.cluster.replicas["demo-gateway"] == 1  # who asks now is told that nothing serves yet
    assert "RevisionMade" not in {event[1] for event in stage.cluster.events}
    stage.end()
    await stage.settle()
    (first,) = stage.runtime()
    assert stage.runtime() == {first: 2}
    assert (stage.told("QualityVerified"), stage.told("Ready")) == (("True", "Passed"), ("True", "Serving"))
    assert stage.cluster.status["quality"]["checks"][0]["value"] == 0.0002
    assert [event[:2] for event in stage.cluster.events].count(("Normal", "RevisionMade")) == 1

    # A change that fails: what serves is scaled and patched on, and nothing of the change is made.
    stage.manifest["spec"]["quantization"] = "fp8"
    stage.manifest["metadata"]["generation"] = 2
    await stage.settle()
    assert (stage.runtime(), stage.told("Progressing")) == ({first: 2}, ("True", "VerifyingQuality"))
    stage.end(0.3)
    await stage.settle()
    assert stage.told("QualityVerified") == ("False", "Failed")
    assert stage.told("Progressing") == ("False", "QualityFailed")
    assert stage.told("Degraded") == ("True", "QualityFailed")
    assert stage.told("Ready") == ("True", "Serving")
    assert stage.cluster.status["observedGeneration"] == 2
    stage.manifest["spec"] |= {
        "scaling": {"minReplicas": 3, "maxReplicas": 4},
        "slo": {"ttftMilliseconds": 450},
    }
    await stage.settle()
    assert stage.runtime() == {first: 3}
    assert {state["ttft_milliseconds"] for state in stage.scraper.state.values()} == {450.0}

    # Back to what was verified: at once, with no other evaluation.
    stage.manifest["spec"]["quantization"] = "int8"
    await stage.step()
    assert stage.told("QualityVerified") == ("True", "Passed")
    assert all(one.phase == "ended" for one in stage.cluster.evaluations.values())
    kinds = [event[:2] for event in stage.cluster.events if event[1] in ("Verifying", "Passed", "Failed")]
    assert kinds == [
        ("Normal", "Verifying"),
        ("Normal", "Passed"),
        ("Normal", "Verifying"),
        ("Warning", "Failed"),
        ("Normal", "Passed"),
    ]


async def test_a_verified_change_rolls_out_and_its_job_is_all_that_is_kept(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await stage.settle()
    stage.end()
    await stage.settle()
    (first,) = stage.runtime()
    stage.manifest["spec"]["quantization"] = "fp8"
    await stage.settle()
    job = stage.end()
    for _ in range(3):
        await stage.settle()
    (second,) = stage.runtime()
    assert second != first
    assert [child.name for child in stage.cluster.children if child.kind == "Job"] == [job]
    assert stage.told("Progressing") == ("False", "Settled")


async def test_an_operator_that_restarts_judges_nothing_anew(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await stage.settle()
    stage.carried = Carried()
    await stage.settle()
    assert len(stage.cluster.evaluations) == 1  # it found the one that runs
    stage.end(0.3)
    stage.carried = Carried()
    await stage.settle()
    for child in [child for child in stage.cluster.children if child.kind == "Job"]:
        await stage.cluster.prune(ServiceKey("default", "demo"), child)
    stage.carried = Carried()
    stage.world = replace(stage.world)
    await stage.settle()
    assert (stage.cluster.evaluations, stage.told("QualityVerified")) == ({}, ("False", "Failed"))
    assert stage.runtime() == {}


async def test_a_newer_operator_judges_nothing_anew_and_holds_nothing_back(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await stage.settle()
    stage.end()
    await stage.settle()
    before = stage.runtime()
    stage.cluster.site = replace(stage.cluster.site, runtime_image="runtime:2", gateway_image="gateway:2")
    await stage.settle()
    assert (stage.runtime(), stage.told("QualityVerified")) == (before, ("True", "Passed"))
    assert len(stage.cluster.evaluations) == 1
    # An edit brings the newer image along, which nobody has judged.
    stage.manifest["spec"]["drainTimeoutSeconds"] = 5
    await stage.settle()
    assert (stage.runtime(), stage.told("Progressing")) == (before, ("True", "VerifyingQuality"))


async def test_a_changed_file_is_judged_anew_while_the_service_serves(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {"text": "configmap://judge/a"}}
    await stage.settle()
    assert stage.told("QualityVerified") == ("Unknown", "FileMissing")
    assert (stage.cluster.evaluations, stage.told("Degraded")) == ({}, ("True", "QualityFileMissing"))
    stage.cluster.files["configmap://judge/a"] = "1"
    await stage.settle()
    stage.end()
    await stage.settle()
    before = stage.runtime()
    stage.cluster.files["configmap://judge/a"] = "2"
    await stage.settle()
    stage.end(0.3)
    await stage.settle()
    assert (stage.told("QualityVerified"), stage.told("Ready")) == (("False", "Failed"), ("True", "Serving"))
    assert stage.runtime() == before
    assert "withheld" not in stage.cluster.status["quality"]


async def test_without_the_gate_what_was_withheld_is_served(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await stage.settle()
    stage.end(0.3)
    await stage.settle()
    assert stage.runtime() == {}
    del stage.manifest["spec"]["quality"]
    await stage.settle()
    assert list(stage.runtime().values()) == [2]
    assert stage.cluster.evaluations == {}
    assert "quality" not in stage.cluster.status
    assert "QualityVerified" not in {one["type"] for one in stage.cluster.status["conditions"]}


async def test_scaled_to_zero_nothing_is_judged_until_it_is_raised(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}, "replicas": 0}
    await stage.settle()
    assert (stage.cluster.evaluations, stage.told("QualityVerified")) == ({}, ("Unknown", "ScaledToZero"))
    assert stage.told("Ready") == ("False", "ScaledToZero")
    stage.manifest["spec"]["replicas"] = 1
    await stage.settle()
    assert stage.told("QualityVerified") == ("Unknown", "Verifying")


async def test_the_gate_shows_in_the_operators_metrics(stage: Stage) -> None:
    metrics, where = OperatorMetrics(), 'name="demo",namespace="default"'

    async def page() -> str:
        metrics.passed(await stage.step(), 0.1)
        return generate_latest(metrics.registry).decode()

    assert "quality_verified{" not in await page()
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    assert f"headway_operator_quality_verified{{{where}}} 0.0" in await page()
    await stage.step()
    stage.end()
    for text in (await page(), await page()):
        assert f"headway_operator_quality_verified{{{where}}} 1.0" in text
        assert f'headway_operator_quality_judgements_total{{{where},reason="Passed"}} 1.0' in text
        check = f'check="mean KL divergence",{where}'
        assert f"headway_operator_quality_measured{{{check}}} 0.0002" in text
        assert f"headway_operator_quality_limit{{{check}}} 0.01" in text
    del stage.manifest["spec"]["quality"]
    text = await page()
    assert "quality_measured{" not in text
    assert "quality_verified{" not in text
    metrics.forget(ServiceKey("default", "demo"))
    assert "replicas_wanted{" not in generate_latest(metrics.registry).decode()


async def test_a_suspended_service_ends_its_evaluation_and_takes_it_up_again(stage: Stage) -> None:
    stage.manifest["spec"] |= {"quantization": "int8", "quality": {}}
    await stage.settle()
    assert [one.phase for one in stage.cluster.evaluations.values()] == ["running"]
    stage.manifest["spec"]["suspend"] = True
    await stage.settle()
    assert stage.cluster.evaluations == {}
    assert stage.told("QualityVerified") == ("Unknown", "Suspended")
    assert (stage.told("Ready"), stage.told("Progressing")) == (
        ("False", "Suspended"),
        ("False", "Suspended"),
    )
    del stage.manifest["spec"]["suspend"]
    await stage.settle()
    assert stage.told("QualityVerified") == ("Unknown", "Verifying")
    stage.end()
    await stage.settle()
    assert list(stage.runtime().values()) == [2]
