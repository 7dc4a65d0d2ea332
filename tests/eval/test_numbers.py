"""The numbers behind a verdict, each against a formula or a count made in another way."""

import math
from collections.abc import Sequence

import pytest
import torch

from headway_eval import divergence
from headway_eval.divergence import compare
from headway_eval.errors import ComparisonError
from headway_eval.intervals import discordant_probability, wilson
from headway_eval.matching import Match, is_right
from headway_eval.task_summary import Paired, summarize_suite
from headway_eval.text_summary import TextSummary, summarize
from headway_eval.verdict import DEFAULTS, Thresholds, judge
from headway_eval.verdict_file import MAX_NOTE_CHARACTERS
from headway_eval.windows import windows


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"),
    [(2, 8, 4), (8, 8, 4), (9, 8, 4), (100, 8, 7), (100, 8, 1), (101, 16, 8), (33, 32, 16), (1000, 96, 32)],
)
def test_each_token_but_the_first_is_scored_once_and_with_context(
    num_tokens: int, window: int, stride: int
) -> None:
    scored: list[int] = []
    for one in windows(num_tokens, window, stride):
        assert 0 <= one.start < one.scored_from < one.end <= num_tokens
        assert one.end - one.start <= window
        if one.start:
            assert one.scored_from - one.start >= min(window - stride, num_tokens - stride)
        scored += range(one.scored_from, one.end)
    assert scored == list(range(1, num_tokens))


def test_divergence_and_losses_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "NUMBERS_AT_ONCE", 130)  # slices of three rows
    generator = torch.Generator().manual_seed(2)
    model, baseline = (torch.randn(10, 40, generator=generator) * 4 for _ in range(2))
    following = torch.randint(0, 40, (10,), generator=generator)
    found = compare(model, baseline, following)
    for row in range(10):
        p, q = (logits[row].double().softmax(-1) for logits in (baseline, model))
        assert found.divergence[row] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)
        assert found.model_loss[row] == pytest.approx(-math.log(float(q[following[row]])), rel=1e-9)
        assert found.baseline_loss[row] == pytest.approx(-math.log(float(p[following[row]])), rel=1e-9)
        assert found.same_choice[row] == (int(p.argmax()) == int(q.argmax()))


def test_what_is_impossible_for_the_baseline_adds_nothing() -> None:
    baseline = torch.tensor([[0.0, 0.0, -math.inf]])
    model = torch.tensor([[0.0, 0.0, 0.0]])
    (found,) = compare(model, baseline, torch.tensor([0])).divergence
    assert found == pytest.approx(math.log(1.5))
    (found,) = compare(baseline, model, torch.tensor([0])).divergence
    assert found == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_not_hidden(bad: float) -> None:
    good, broken = torch.zeros(2, 3), torch.zeros(2, 3)
    broken[1, 2] = bad
    found = compare(broken, good, torch.tensor([0, 0]))
    assert found.divergence[0] == 0.0
    assert math.isnan(found.divergence[1])
    summary = summarize(1, found.model_loss, found.baseline_loss, found.divergence, found.same_choice)
    verdict = judge(summary, [], DEFAULTS)
    assert [(check.passed, check.note) for check in verdict.checks] == 2 * [(False, "logits are not finite")]


def test_p99_is_the_nearest_rank() -> None:
    values = [float(one) for one in range(1, 201)]
    summary = summarize(1, [0.0] * 200, [0.0] * 200, values[::-1], [True] * 150 + [False] * 50)
    assert (summary.p99_kl, summary.largest_kl, summary.mean_kl) == (198.0, 200.0, 100.5)
    assert summary.same_choice_share == 0.75


def test_the_intervals_of_shares_are_wilsons() -> None:
    # As scipy.stats.binomtest(...).proportion_ci(method="wilson") gives them.
    assert wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson(272, 272) == pytest.approx((0.986073, 1.0), abs=1e-6)


@pytest.mark.parametrize(
    ("lost", "won", "want"),
    [(0, 0, 1.0), (1, 1, 1.0), (5, 0, 2 / 32), (6, 0, 2 / 64), (0, 6, 2 / 64), (9, 1, 2 * 11 / 1024)],
)
def test_the_test_of_pairs_counts_coin_throws(lost: int, won: int, want: float) -> None:
    assert discordant_probability(lost, won) == pytest.approx(want)


def test_the_test_of_many_pairs_does_not_overflow() -> None:
    assert discordant_probability(2600, 2400) == pytest.approx(0.0049, abs=2e-4)
    assert discordant_probability(5000, 0) == 0.0


@pytest.mark.parametrize(
    ("match", "want", "given", "right"),
    [
        ("exact", "46", " 46\n", True),
        ("exact", "46", "46.", False),
        ("contains", "Paris", "It is Paris.", True),
        ("contains", "Paris", "It is paris.", False),
        ("regex", r"\b46$", "12 + 34 = 46", True),
        ("regex", r"\b46$", "146", False),
        ("json", {"a": [1, 2]}, '{ "a": [1,2] }', True),
        ("json", {"a": 1}, '{"a": true}', False),
        ("json", {"a": 1}, '{"a": 1', False),
        ("json", {"a": 1}, "[" * 100_000, False),
        ("json", {"a": 1, "b": 2}, '{"b": 2, "a": 1}', True),
    ],
)
def test_an_answer_is_right_by_its_rule(match: Match, want: object, given: str, right: bool) -> None:  # noqa: FBT001
    assert is_right(match, want, given) is right


def outcomes(lost: int, won: int, both: int, neither: int = 0) -> Sequence[Paired]:
    return [
        *[Paired("c", model_right=False, baseline_right=False)] * neither,
        *[Paired("a", model_right=False, baseline_right=True)] * lost,
        *[Paired("a", model_right=True, baseline_right=False)] * won,
        *[Paired("b", model_right=True, baseline_right=True)] * both,
    ]


@pytest.mark.parametrize(
    ("lost", "won", "both", "passed", "note"),
    [
        pytest.param(0, 0, 50, True, "", id="the same"),
        pytest.param(5, 0, 50, True, "may be chance (p=0.062): 5 lost, 0 won; give more tasks", id="few"),
        pytest.param(6, 0, 50, False, "not chance (p=0.031): 6 lost, 0 won", id="enough"),
        pytest.param(6, 0, 994, True, "", id="certain, but small"),
        pytest.param(0, 30, 50, True, "", id="better"),
    ],
)
def test_a_drop_counts_where_it_is_large_and_not_chance(
    lost: int,
    won: int,
    both: int,
    passed: bool,  # noqa: FBT001
    note: str,
) -> None:
    suite = summarize_suite("mine", outcomes(lost, won, both))
    verdict = judge(None, [suite], DEFAULTS)
    (check,) = verdict.checks
    assert (verdict.passed, check.note, check.name) == (passed, note, "accuracy drop, mine")
    assert check.value == pytest.approx(100 * (lost - won) / (lost + won + both))


FEW = "got 5 of 5 right, and losing all of them may be chance (p=0.062)"
NONE = "got 0 of 20 right, and losing all of them may be chance (p=1)"
RARE = "got 20 of 1000 right, and the limit of 2 points lets it lose them all"


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        pytest.param((5, 0, 0), FEW, id="all are lost, but few"),
        pytest.param((0, 0, 5), FEW, id="none is lost, but few could be"),
        pytest.param((0, 0, 0, 20), NONE, id="the baseline knows nothing"),
        pytest.param((0, 20, 0), NONE, id="the model alone knows"),
        pytest.param((20, 0, 0, 980), RARE, id="too few for the limit"),
    ],
)
def test_tasks_that_cannot_fail_are_a_note_beside_others_and_no_verdict_alone(
    answers: tuple[int, ...], why: str
) -> None:
    suite, other = summarize_suite("mine", outcomes(*answers)), summarize_suite("other", outcomes(6, 0, 0))
    with pytest.raises(ComparisonError) as caught:
        judge(None, [suite, suite], DEFAULTS)
    assert f"passes ('mine': the baseline {why}; 'mine': " in str(caught.value)
    text = summarize(1, [1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [True, True])
    for verdict in (judge(text, [suite], DEFAULTS), judge(None, [other, suite], DEFAULTS)):
        check = verdict.checks[-1]
        assert (check.passed, check.note) == (True, f"cannot fail: the baseline {why}; give more tasks")
        assert len(check.note) <= MAX_NOTE_CHARACTERS
    assert not verdict.passed


@pytest.mark.parametrize("answers", [(6, 0, 0), (21, 0, 0, 979)], ids=["six", "just above the limit"])
def test_as_few_tasks_as_can_fail_are_a_verdict_alone(answers: tuple[int, ...]) -> None:
    assert not judge(None, [summarize_suite("mine", outcomes(*answers))], DEFAULTS).passed


def test_kinds_are_summed_up_apart() -> None:
    suite = summarize_suite("mine", outcomes(3, 1, 4))
    assert [(one.name, one.num_tasks, one.model_right, one.baseline_right) for one in suite.kinds] == [
        ("a", 4, 1, 3),
        ("b", 4, 4, 4),
    ]
    assert (suite.whole.num_lost, suite.whole.num_won, suite.whole.drop_points) == (3, 1, 25.0)


def test_each_threshold_decides_alone() -> None:
    text = TextSummary(
        num_texts=1,
        num_tokens=10,
        model_perplexity=2.1,
        baseline_perplexity=2.0,
        perplexity_increase=0.05,
        perplexity_increase_interval=(0.01, 0.09),
        mean_kl=0.01,
        p99_kl=0.1,
        largest_kl=0.2,
        same_choice_share=0.9,
    )
    for thresholds, want in (
        (Thresholds(0.01, 0.06, 2.0), [True, True]),
        (Thresholds(0.009, 0.06, 2.0), [False, True]),
        (Thresholds(0.01, 0.04, 2.0), [True, False]),
    ):
        assert [check.passed for check in judge(text, [], thresholds).checks] == want


def test_an_increase_of_perplexity_counts_where_it_is_no_chance() -> None:
    generator = torch.Generator().manual_seed(8)
    for count, want in ((10, True), (4000, False)):
        losses = torch.rand(count, generator=generator, dtype=torch.float64)
        worse = losses + 0.05 + torch.randn(count, generator=generator, dtype=torch.float64) * 0.3
        text = summarize(1, worse.tolist(), losses.tolist(), [0.0] * count, [True] * count)
        differences = worse - losses
        error = float(differences.std()) / math.sqrt(count)
        low, high = text.perplexity_increase_interval
        assert low == pytest.approx(math.exp(float(differences.mean()) - 1.96 * error) - 1, abs=1e-4)
        assert high == pytest.approx(math.exp(float(differences.mean()) + 1.96 * error) - 1, abs=1e-4)
        check = judge(text, [], Thresholds(1.0, 0.0, 1.0)).checks[1]
        assert check.passed is want
        assert ("may be chance" in check.note) is want


def test_of_a_single_token_no_increase_is_known() -> None:
    text = summarize(1, [5.0], [1.0], [0.0], [True])
    assert text.perplexity_increase_interval == (-1.0, math.inf)
    assert judge(text, [], DEFAULTS).passed


def test_a_perplexity_without_bound_fails() -> None:
    text = summarize(1, [math.inf, 1.0], [1.0, 1.0], [math.inf, 0.0], [True, True])
    assert [check.passed for check in judge(text, [], DEFAULTS).checks] == [False, False]
