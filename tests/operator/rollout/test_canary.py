"""A candidate takes small shares first, and all of them only if it does as well as what serves beside it."""

from dataclasses import replace
from typing import Any

import pytest

from headway_operator.quality import Gate
from headway_operator.rollout import follow
from headway_operator.rollout.canary import chance_of, judge
from headway_operator.rollout.evidence import CanaryEvidence, Side
from headway_operator.samples import RevisionTotals
from headway_operator.slo.histogram import bucket_of
from headway_operator.slo.slices import Slice

Toy = Any  # of conftest.py

HOLD_SECONDS = 30
CANARY = {
    "canary": {"steps": [10, 50], "holdSeconds": HOLD_SECONDS, "minRequests": 20},
    "progressDeadlineSeconds": 120,
}
CHANGE = {"drainTimeoutSeconds": 5}


class Traffic:
    """Forty requests per pass, spread as the gateway is told; a revision answers as the test says."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.milliseconds: dict[str, float] = {}
        self.failing: dict[str, float] = {}
        self.shares: list[int] = []

    def step(self, passes: int = 1, requests: int = 40) -> None:
        toy = self.toy
        for _ in range(passes):
            weights = toy.told.weights
            for name, revision in toy.revisions.items():
                share = weights.get(name, 0) / 100 if weights else 1 / len(toy.revisions)
                self._serve(name, revision.hash, round(requests * share))
            toy.step()
            self.shares.append(toy.status["rollout"].get("weight", 0))

    def _serve(self, name: str, hash_: str, count: int) -> None:
        ready = [pod for pod in self.toy.pods if pod.revision == hash_ and pod.phase == "ready"]
        if not ready or not count:
            return
        failed = round(count * self.failing.get(hash_, 0.0))
        before = self.toy.answered.get(name, RevisionTotals(0, 0))
        self.toy.answered[name] = RevisionTotals(before.requests + count, before.errors + failed)
        milliseconds = self.milliseconds.get(hash_, 100.0)
        ready[0].ttft[milliseconds] = ready[0].ttft.get(milliseconds, 0) + count
        if milliseconds <= 300:
            ready[0].met += count
        else:
            ready[0].missed += count


@pytest.fixture
def traffic(toy: Toy) -> Traffic:
    toy.edit(rollout=CANARY)
    toy.wanted = 2
    return Traffic(toy)


def begun(toy: Toy, traffic: Traffic) -> tuple[str, str]:
    """Old and new hash, in the first step of a canary."""
    old = toy.current
    toy.edit(**CHANGE)
    for _ in range(20):
        traffic.step()
        if toy.status["rollout"].get("weight") == 10:
            return old, toy.current
    raise AssertionError("the canary does not begin")


def test_a_good_candidate_takes_step_after_step_and_then_all(toy: Toy, traffic: Traffic) -> None:
    old, new = begun(toy, traffic)
    assert toy.told_of("Progressing")[:2] == ("True", "Canary")
    assert toy.count(old, "ready") == 2
    assert toy.count(new, "ready") == 1
    traffic.step(60)
    assert [share for i, share in enumerate(traffic.shares) if share != traffic.shares[i - 1]] == [10, 50, 0]
    assert (toy.count(new, "ready"), toy.count(old, "ready")) == (2, 0)
    assert toy.told.weights == {}
    assert toy.told_of("Progressing")[1] == "Settled"


def test_the_candidate_gets_nothing_before_the_gateway_goes_by_shares(toy: Toy, traffic: Traffic) -> None:
    toy.edit(**CHANGE)
    told, toy.told = toy.told, None  # a gateway of an earlier version
    traffic_less = 10
    for _ in range(traffic_less):
        toy.step()
    assert toy.count(toy.current, "starting", "ready") == 0
    assert "does not yet go by the shares" in toy.told_of("Progressing")[2]
    toy.told = told
    toy.step()
    name = toy.rendered.revision.name
    assert toy.told.weights[name] == 0
    toy.step()
    assert toy.count(toy.current, "starting", "ready") == 1


def test_each_step_lasts_as_long_as_it_must_and_has_as_many_requests(toy: Toy, traffic: Traffic) -> None:
    begun(toy, traffic)
    traffic.step(30, requests=0)
    assert toy.status["rollout"]["weight"] == 10
    assert "of rollout.canary.minRequests=20 requests have come" in toy.told_of("Progressing")[2]
    traffic.step(60, requests=0)
    status, reason, message = toy.told_of("Degraded")
    assert (status, reason) == ("True", "ProgressDeadlineExceeded")
    assert "minRequests=20" in message


@pytest.mark.parametrize(
    ("milliseconds", "failing", "want_reason", "want_words"),
    [
        pytest.param(900.0, 0.0, "CanaryTTFTViolated", "missed the TTFT target of 300 ms", id="misses"),
        pytest.param(250.0, 0.0, "CanaryTTFTSlower", "its P95 TTFT is", id="slower within the target"),
        pytest.param(100.0, 0.5, "CanaryErrors", "requests failed, against 0 of", id="fails"),
    ],
)
def test_a_bad_candidate_is_given_up_and_gets_nothing_more(
    toy: Toy, traffic: Traffic, milliseconds: float, failing: float, want_reason: str, want_words: str
) -> None:
    old, new = begun(toy, traffic)
    traffic.milliseconds[new], traffic.failing[new] = milliseconds, failing
    for _ in range(40):
        traffic.step()
        if toy.current == old:
            break
    assert toy.told.weights == {f"demo-{old}": 100}
    status, reason, message = toy.told_of("Progressing")
    assert (status, reason) == ("False", want_reason)
    assert want_words in message
    assert "at a share of 10%" in message
    traffic.step(20)
    assert (toy.count(old, "ready"), toy.count(new, "ready"), toy.told.weights) == (2, 0, {})
    assert toy.told_of("Degraded")[:2] == ("True", want_reason)
    assert max(traffic.shares) == 10


def test_a_candidate_that_was_slower_at_first_has_its_step_repeated(toy: Toy, traffic: Traffic) -> None:
    old, new = begun(toy, traffic)
    traffic.milliseconds[new] = 250.0
    waits: list[str] = []
    while not waits or "the step is repeated" not in waits[-1]:
        assert len(waits) < HOLD_SECONDS
        traffic.step()
        waits.append(toy.told_of("Progressing")[2])
    began = toy.status["rollout"]["stepStartedAt"]
    assert "its P95 TTFT is" in waits[-1]
    traffic.milliseconds[new] = 100.0
    traffic.step()
    assert "its share of 10% is held once again for" in toy.told_of("Progressing")[2]
    assert toy.status["rollout"]["stepStartedAt"] == began, "it is repeated once"
    traffic.step(60)
    assert toy.current == new
    assert (toy.count(new, "ready"), toy.count(old, "ready")) == (2, 0)


@pytest.mark.parametrize("what", ["the gateway's sample is lost now and then", "the operator restarts"])
def test_a_step_is_repeated_once_whatever_happens_meanwhile(toy: Toy, traffic: Traffic, what: str) -> None:
    old, new = begun(toy, traffic)
    traffic.milliseconds[new] = 250.0
    repeated = 0
    for number in range(100):
        if what == "the operator restarts":
            toy.evidence = None if number % 20 == 0 else toy.evidence
        elif number % 7 == 0:
            told, toy.told = toy.told, None
            toy.step()
            toy.told = told
        traffic.step()
        repeated += "the step is repeated" in toy.told_of("Progressing")[2]
        if toy.current == old:
            break
    assert toy.told_of("Progressing")[:2] == ("False", "CanaryTTFTSlower")
    assert repeated == 1


def test_what_a_repeated_step_has_answered_is_not_asked_again(build: Any) -> None:
    """While it waits for something else it would be asked at each pass, until chance answers."""
    fast, slow = side(400, milliseconds=100.0), side(400, milliseconds=250.0)
    evidence = CanaryEvidence(("c", 0), 0.0, 10.0, slow, fast)
    found = [
        judge(evidence, build.target(), is_last=True, slowness=one) for one in ("", "suspected", "cleared")
    ]
    assert [one and one.reason for one in found] == ["CanaryTTFTSlower", "CanaryTTFTSlower", None]


def test_a_step_that_is_repeated_has_as_many_requests_as_any(toy: Toy, traffic: Traffic) -> None:
    _, new = begun(toy, traffic)
    traffic.milliseconds[new] = 250.0
    while "the step is repeated" not in toy.told_of("Progressing")[2]:
        traffic.step()
        assert toy.status["rollout"]["weight"] == 10
    traffic.step(20, requests=0)
    assert "0 of rollout.canary.minRequests=20 requests have come" in toy.told_of("Progressing")[2]


def test_a_load_under_which_both_miss_gives_nobody_up(toy: Toy, traffic: Traffic) -> None:
    old, new = begun(toy, traffic)
    traffic.milliseconds[new] = traffic.milliseconds[old] = 900.0
    traffic.step(15)
    assert toy.status["rollout"]["weight"] == 10
    assert "the load is too high to judge" in toy.told_of("Progressing")[2]
    traffic.milliseconds.clear()
    assert toy.current == new


def test_an_operator_that_restarts_goes_on_with_the_step(toy: Toy, traffic: Traffic) -> None:
    begun(toy, traffic)
    traffic.step()
    started_at = toy.status["rollout"]["stepStartedAt"]
    toy.evidence = None
    traffic.step(1)
    assert toy.status["rollout"]["stepStartedAt"] == started_at
    traffic.step(60)
    assert toy.told_of("Progressing")[1] == "Settled"


def test_a_verdict_on_quality_that_fails_gives_the_candidate_up(toy: Toy, traffic: Traffic) -> None:
    _, new = begun(toy, traffic)
    from headway_operator.manifests import render
    from headway_operator.spec import parse

    service = parse({**toy.manifest, "status": toy.status})
    rendered = render(service, toy.build.site(), "PEM", frozenset())
    gate = Gate("False", "Failed", "mean KL divergence 0.3 nats")
    _, rollout = follow(service, rendered, toy.observed(), toy.sample(), 2, gate, toy.evidence, toy.now)
    assert rollout.record.failed is not None
    assert (rollout.given_up, rollout.record.failed.reason) == (f"demo-{new}", "CanaryQualityFailed")
    gate = replace(gate, status="Unknown", reason="Verifying")
    _, rollout = follow(service, rendered, toy.observed(), toy.sample(), 2, gate, toy.evidence, toy.now + 60)
    assert rollout.record.weight == 10


def side(
    requests: int, errors: int = 0, milliseconds: float = 100.0, met: int = 0, missed: int = 0, left: int = 0
) -> Side:
    counted = Slice(
        0.0,
        10.0,
        {"ttft_met": met, "ttft_missed": missed},
        {"ttft": {bucket_of(milliseconds): requests}, "tpot": {}},
    )
    return Side(counted, RevisionTotals(requests, errors, left))


@pytest.mark.parametrize(
    ("candidate", "stable", "want"),
    [
        pytest.param(side(100), side(900), "", id="alike"),
        pytest.param(side(100, errors=2), side(900), "", id="two failures are few"),
        pytest.param(side(100, errors=5), side(900, errors=1), "CanaryErrors", id="many failures"),
        pytest.param(side(100, errors=5), side(900, errors=45), "", id="as many as the other has"),
        pytest.param(side(0, left=5), side(900, left=9), "CanaryErrors", id="hangs until clients leave"),
        pytest.param(side(100, left=5), side(900, left=45), "", id="left as often as the other"),
        pytest.param(side(100, met=80, missed=20), side(900, met=900), "CanaryTTFTViolated", id="misses"),
        pytest.param(side(100, milliseconds=112.0), side(900), "", id="a bucket slower"),
        pytest.param(side(100, milliseconds=150.0), side(900), "CanaryTTFTSlower", id="slower"),
        pytest.param(side(100, milliseconds=150.0), side(9), "", id="too little to compare with"),
        pytest.param(side(100, milliseconds=20.0), side(900, milliseconds=6.0), "", id="slower, unnoticed"),
    ],
)
def test_what_speaks_against_a_candidate(build: Any, candidate: Side, stable: Side, want: str) -> None:
    evidence = CanaryEvidence(("c", 0), 0.0, 10.0, candidate, stable)
    finding = judge(evidence, build.target(), is_last=True)
    assert (finding.reason if finding else "") == want


@pytest.mark.parametrize(
    ("candidate", "stable", "when", "want"),
    [
        pytest.param(
            side(100, met=88, missed=12),
            side(100, met=96, missed=4),
            "early",
            ("", "it may be chance: 12 of its 100"),
            id="misses more, early",
        ),
        pytest.param(
            side(100, met=88, missed=12),
            side(100, met=96, missed=4),
            "at the end",
            ("CanaryTTFTViolated", "12 of its 100"),
            id="misses more, in the end",
        ),
        pytest.param(
            side(100, met=90, missed=10),
            side(100, met=94, missed=6),
            "at the end",
            ("", "it may be chance: 10 of its 100"),
            id="misses hardly more",
        ),
        pytest.param(
            side(100, met=88, missed=12),
            side(100, met=90, missed=10),
            "at the end",
            ("", "the load is too high to judge: 12 of its 100"),
            id="both miss",
        ),
        pytest.param(
            side(100, met=88, missed=12),
            side(3, met=3),
            "at the end",
            ("CanaryTTFTViolated", "against 0 of 3"),
            id="nobody to compare with",
        ),
    ],
)
def test_a_target_is_missed_by_more_than_chance_or_the_step_lasts_on(
    build: Any, candidate: Side, stable: Side, when: str, want: tuple[str, str]
) -> None:
    evidence = CanaryEvidence(("c", 0), 0.0, 10.0, candidate, stable)
    finding = judge(evidence, build.target(), is_last=when == "at the end")
    assert finding is not None
    assert finding.reason == want[0]
    assert want[1] in finding.message


def test_chance_is_that_of_fishers_exact_test() -> None:
    # The lady tasting tea: 3 of 4 cups right or better (Fisher 1935), 17 of 70.
    assert chance_of(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert chance_of(0, 10, 5, 10) == pytest.approx(1.0)
    assert chance_of(4, 4, 0, 4) == pytest.approx(1 / 70)
