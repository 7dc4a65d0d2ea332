"""The law with a model of steps: how far the batch limits go from its best ones."""

from dataclasses import replace

import pytest
from tests.operator.law_fleet import BEST, CAPACITY, MODEL, NOW, Fleet

from headway_operator.samples import Limits, Targets
from headway_operator.slo.predictions import Factors
from headway_operator.slo.step_fit import StepFit


def test_slow_tokens_among_many_prompts_trim_the_budget_and_no_further(fleet: Fleet) -> None:
    """Whatever is missed, for however long: a fifth below the model's best is the end."""
    fleet.violated("tpot")
    fleet.per_second = 8.0
    steps = StepFit(model=replace(MODEL, prefill=0.06, sequence=0.2))
    fleet.memory = fleet.memory._replace(fit=steps, limits=Limits(32, 2048))
    decision, memory = fleet.decide()
    assert (decision.limits, decision.cause) == (Limits(32, 1638), "LoweredTokenBudget")
    assert "trimmed for what is measured" in decision.message
    for _ in range(5):
        fleet.memory = memory._replace(limits_changed_at=NOW - 60, kappa_cut_at=None)
        decision, memory = fleet.decide()
    assert decision.limits.max_num_batched_tokens == 1638


@pytest.mark.parametrize(
    ("running", "least"), [pytest.param(10, 0, id="few run"), pytest.param(25, 30, id="nearly all places")]
)
def test_slow_tokens_of_many_sequences_trim_the_batch_but_make_no_queue(
    fleet: Fleet, running: int, least: int
) -> None:
    fleet.violated("tpot")
    fleet.gauges["running"] = running
    fit = StepFit(model=replace(MODEL, prefill=0.03, sequence=0.3))
    fleet.memory = fleet.memory._replace(fit=fit, limits=Limits(36, 2048))
    decision, _ = fleet.decide()
    assert decision.cause == "LoweredBatchLimit"
    best = decision.evidence["best_max_num_seqs"]
    assert decision.limits == Limits(max(round(0.8 * best), least), 2048)


@pytest.mark.parametrize(
    ("load", "waiting", "is_room_for_all"),
    [
        pytest.param(4.3, 0, True, id="a little too few replicas"),
        pytest.param(4.3, 1, True, id="and one waits at each, too late"),
        pytest.param(4.3, 40, False, id="and so many wait that TPOT would be far off with them inside"),
        pytest.param(4.52, 0, False, id="and TPOT is off by little, but for far more than would be late"),
        pytest.param(6.0, 0, False, id="far too few"),
    ],
)
def test_no_queue_is_made_where_replicas_lack_but_a_little(
    fleet: Fleet, load: float, waiting: int, *, is_room_for_all: bool
) -> None:
    fleet.per_second = load * CAPACITY
    fleet.gauges |= {"waiting": waiting, "oldest_waiting_seconds": 5.0 if waiting else 0.0}
    numbers = fleet.decide()[0].evidence
    fleet.memory = fleet.memory._replace(limits=Limits(20, 2048))
    decision, _ = fleet.decide()
    assert (decision.limits.max_num_seqs > numbers["best_max_num_seqs"]) is is_room_for_all


@pytest.mark.parametrize(
    ("waiting", "oldest_waiting_seconds", "is_full"),
    [
        pytest.param(20, 3.0, True, id="many wait and some are late"),
        pytest.param(20, 0.3, False, id="nobody is late yet"),
        pytest.param(2, 3.0, False, id="a few are late"),
    ],
)
def test_more_load_than_can_be_served_lets_in_only_whom_tpot_is_kept_for(
    fleet: Fleet, waiting: int, oldest_waiting_seconds: float, *, is_full: bool
) -> None:
    fleet.violated("ttft")
    fleet.per_second = 8.0 * CAPACITY
    running = {"running": 33, "waiting": waiting, "oldest_waiting_seconds": oldest_waiting_seconds}
    fleet.gauges |= running
    fleet.memory = fleet.memory._replace(fit=StepFit(model=replace(MODEL, sequence=0.35)))
    numbers = fleet.decide()[0].evidence
    best, full = numbers["best_max_num_seqs"], numbers["full_max_num_seqs"]
    assert full < best
    # From the best, though it is near; and back from far.
    for limit in (int(best), 60):
        fleet.memory = fleet.memory._replace(limits=Limits(limit, 2048))
        decision, _ = fleet.decide()
        assert decision.limits.max_num_seqs == (full if is_full else best)


def test_both_broken_take_the_best_limits_and_replicas_at_once(fleet: Fleet) -> None:
    fleet.violated("ttft", "tpot")
    fleet.per_second = 6.5 * CAPACITY
    fleet.memory = fleet.memory._replace(trims=(0.8, 0.8), limits=Limits(26, 1638))
    decision, memory = fleet.decide()
    assert decision.replicas == 7
    assert decision.limits.max_num_batched_tokens > 1638
    assert min(memory.trims) > 0.8


def test_trims_go_back_while_nothing_is_wrong(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(
        trims=(1.0, 0.8), limits=Limits(33, 1638), limits_changed_at=NOW - 20
    )
    decision, memory = fleet.decide()
    assert memory.trims[0] == 1.0
    assert memory.trims[1] == pytest.approx(0.84)
    assert decision.limits.max_num_batched_tokens == round(2048 * 0.84)


@pytest.mark.parametrize(
    ("running", "waiting", "limit", "want"),
    [
        pytest.param(29, 3, 29, 33, id="all are taken"),
        pytest.param(32, 3, 32, 32, id="all are taken, and there should hardly be more"),
        pytest.param(20, 0, 29, 29, id="some are left"),
        pytest.param(37, 3, 37, 37, id="all are taken, and there should be fewer"),
        pytest.param(29, 3, 33, 33, id="there are as many as there should be"),
    ],
)
def test_a_few_more_places_are_worth_a_change_where_all_are_taken(
    fleet: Fleet, running: int, waiting: int, limit: int, want: int
) -> None:
    fleet.gauges |= {"running": running, "waiting": waiting, "limits": Limits(limit, 2048)}
    fleet.memory = fleet.memory._replace(limits=Limits(limit, 2048))
    decision, _ = fleet.decide()
    assert decision.limits.max_num_seqs == want
    assert decision.cause == ("RaisedBatchLimit" if want > limit else "Steady")


def test_no_few_more_places_are_given_while_tpot_is_missed(fleet: Fleet) -> None:
    fleet.violated("tpot")
    fleet.gauges |= {"running": 29, "waiting": 3, "limits": Limits(29, 2048)}
    fleet.memory = fleet.memory._replace(limits=Limits(29, 2048))
    decision, _ = fleet.decide()
    assert decision.limits.max_num_seqs <= 29


def test_limits_are_looked_at_again_after_fifteen_seconds(fleet: Fleet) -> None:
    fleet.memory = fleet.memory._replace(limits=Limits(8, 256), limits_changed_at=NOW - 14)
    assert fleet.decide()[0].limits == Limits(8, 256)
    fleet.memory = fleet.memory._replace(limits=Limits(8, 256), limits_changed_at=NOW - 15)
    assert fleet.decide()[0].limits == BEST


def test_steps_are_not_kept_short_at_the_cost_of_prompts_while_replicas_lack(fleet: Fleet) -> None:
    """Who is let in from a queue has no time left for a prompt in small pieces; the places keep TPOT."""

    def told() -> tuple[int, float]:
        decision, _ = fleet.decide()
        return decision.limits.max_num_batched_tokens, decision.evidence["best_max_num_batched_tokens"]

    fleet.promise(Targets(700.0, 60.0))
    fleet.memory = fleet.memory._replace(limits=Limits(33, 700))
    enough, best = told()
    assert enough == best < 2048
    fleet.totals |= {"ttft_met": 100, "ttft_missed": 300}
    fleet.now_totals["ttft_missed"] = 30
    tokens, best = told()
    assert tokens == best < 2048, "replicas are enough, though prompts took too long"
    fleet.per_second = 200.0
    tokens, best = told()
    assert best < tokens == 2048
    # Nor where the places alone do not keep TPOT, by what is measured.
    fleet.memory = fleet.memory._replace(factors=Factors(tpot=1.5))
    tokens, best = told()
    assert tokens == best < 2048
