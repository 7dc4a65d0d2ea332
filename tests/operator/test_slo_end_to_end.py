"""Whole answers against their target: reported, judged, told, and nothing moved for them."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headway_operator import conditions
from headway_operator.errors import SpecError
from headway_operator.manifests import render
from headway_operator.plan import plan
from headway_operator.samples import GatewaySample, Sample, Targets
from headway_operator.slo import Memory, decide, target_of, with_end_to_end
from headway_operator.slo.target import Target
from headway_operator.spec import InferenceServiceStatus, parse
from headway_operator.state import Attainment, Decision, Observed, Revision

START = 10_000.0
WHOLE = {"slo": {"ttftMilliseconds": 300, "endToEndMilliseconds": 9000}}
Pass = Callable[..., Decision]


@pytest.fixture
def take_pass(build: Any) -> Pass:
    """Passes 5 s apart over one replica; keywords are its totals since it started."""
    target: Target = build.target(targets=Targets(300.0, None, 9000.0))
    kept: dict[str, Any] = {"memory": Memory(began_at=START), "now": START}
    observed = Observed((Revision("demo-1", "1", 1, START),), (build.replica("r", created_at=START),))

    def step(rejected: int = 0, refused: int = 0, **counters: int) -> Decision:
        now = kept["now"] = kept["now"] + 5.0
        seconds = {8000.0: counters.get("e2e_met", 0), 11_000.0: counters.get("e2e_missed", 0)}
        one = build.sample(
            now,
            targets=target.targets,
            counters={"rejected": rejected, **counters},
            histograms={
                name: build.histogram(seconds if name == "e2e" else {})
                for name in ("ttft", "queue", "prefill", "tpot", "step", "e2e")
            },
        )
        gateway = GatewaySample("g", now, 0, 0.0, 0, {"rejected": refused})
        sample = Sample(now, {"r": one}, {"g": gateway})
        decision, memory = decide(target, kept["memory"], sample, observed, now)
        kept["memory"] = Memory.from_dict(json.loads(json.dumps(memory.to_dict())), now)
        return with_end_to_end(decision, target, kept["memory"])

    return step


def test_counts_are_exact_and_the_percentile_is_measured(take_pass: Pass) -> None:
    assert take_pass().end_to_end == Attainment(9000.0, None, 0, 0, "unknown")
    found = take_pass(e2e_met=100).end_to_end
    assert (found.met, found.missed, found.verdict) == (100, 0, "met")
    assert found.p_milliseconds == pytest.approx(8000.0, rel=0.12)
    found = take_pass(e2e_met=110, e2e_missed=60).end_to_end
    assert (found.met, found.missed, found.verdict) == (110, 60, "violated")
    assert found.p_milliseconds == pytest.approx(11_000.0, rel=0.12)


def test_who_was_turned_away_is_missed_once_whoever_counted(take_pass: Pass) -> None:
    """A replica's refusal may have been served by another one; the gateway knows how it ended."""
    take_pass()
    found = take_pass(e2e_met=50, e2e_missed=7, rejected=5, refused=3).end_to_end
    assert (found.met, found.missed) == (50, 2 + 3)


def test_nothing_is_moved_for_it(take_pass: Pass) -> None:
    take_pass()
    for count in range(1, 60):
        decision = take_pass(e2e_missed=100 * count)
        assert decision.end_to_end.verdict == "violated"
        assert (decision.replicas, decision.limits) == (1, decision.limits)
        assert decision.cause in ("Steady", "Settling"), decision


def test_status_and_condition_tell_it(build: Any) -> None:
    service = parse(build.manifest(WHOLE))
    rendered = render(service, build.site(), "PEM", frozenset())
    violated = Attainment(9000.0, 12_000.0, 60, 40, "violated")
    met = Attainment(300.0, 200.0, 100, 0, "met")
    decision = Decision(
        START, 1, target_of(service.spec).initial, "Steady", "", "", met, replace(met), {}, violated
    )
    status = conditions.status(service, rendered, Observed(), Sample(START), decision, START)
    InferenceServiceStatus.model_validate(status)
    assert status["slo"]["endToEndMilliseconds"]["verdict"] == "violated"
    [slo_met] = [one for one in status["conditions"] if one["type"] == "SLOMet"]
    assert (slo_met["status"], slo_met["reason"]) == ("False", "EndToEndViolated")
    assert "EndToEnd: 60 of 100 requests within target 9000 ms" in slo_met["message"]
    without = replace(decision, end_to_end=Attainment(None, None, 0, 0, "unknown"))
    status = conditions.status(service, rendered, Observed(), Sample(START), without, START)
    assert "endToEndMilliseconds" not in status["slo"]


@pytest.mark.parametrize(("judges", "want"), [(True, {"e2e_milliseconds": 9000.0}), (False, {})])
def test_a_replica_is_told_the_target_if_it_knows_such(
    build: Any, judges: Any, want: dict[str, float]
) -> None:
    service = parse(build.manifest(WHOLE))
    one = build.sample(START, targets=Targets(300.0, None), judges_end_to_end=judges)
    rendered = render(service, build.site(), "PEM", frozenset())
    none = Attainment(None, None, 0, 0, "unknown")
    decision = Decision(START, 1, one.limits, "Steady", "", "", none, none, {})
    todo = plan(service, rendered, Observed(), Sample(START, {"r": one}), decision)
    assert todo.patch == ({"r": want} if want else {})


def test_a_whole_answer_takes_no_less_than_its_first_token(build: Any) -> None:
    with pytest.raises(SpecError, match=r"takes no less than its first token.*they are 200 and 300"):
        parse(build.manifest({"slo": {"ttftMilliseconds": 300, "endToEndMilliseconds": 200}}))
    with pytest.raises(SpecError, match=r"set slo\.ttftMilliseconds"):  # to scale by
        parse(build.manifest({"slo": {"endToEndMilliseconds": 200}}))
