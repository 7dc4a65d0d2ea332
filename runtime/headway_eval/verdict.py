"""Measured numbers against thresholds: which checks are passed, and so whether the model is. Pure.

KL divergence is compared as it is. A drop in accuracy counts only where it is above its threshold and is no
chance either: the exact test of the tasks on which the two differ says so at 5%. Likewise an increase in
perplexity, where its interval holds 0. A number that is NaN passes nothing.

Tasks of which the baseline gets so few right that a model may lose them all cannot fail, whatever is
answered. Beside a check that can, they pass with a note; alone they are no verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway_eval.errors import ComparisonError
from headway_eval.intervals import CONFIDENCE, discordant_probability
from headway_eval.task_summary import SuiteSummary, TaskSummary
from headway_eval.tasks import FLAG as TASKS_FLAG
from headway_eval.text_summary import TextSummary
from headway_eval.texts import FLAG as TEXT_FLAG


@dataclass(frozen=True, slots=True)
class Thresholds:
    """max_kl: nats, of the mean. max_perplexity_increase: relative. max_accuracy_drop: percentage points."""

    max_kl: float
    max_perplexity_increase: float
    max_accuracy_drop: float


# What a lever that works stays well below, and a scale that is wrong does not: docs/eval.md has the figures.
# Weights of 4 bits lose ten times as much as those of 8, so that one limit for both would miss faults of 8.
DEFAULTS = Thresholds(max_kl=0.01, max_perplexity_increase=0.02, max_accuracy_drop=2.0)
DEFAULTS_FOUR_BITS = Thresholds(max_kl=0.05, max_perplexity_increase=0.05, max_accuracy_drop=2.0)


@dataclass(frozen=True, slots=True)
class Check:
    """One number against its threshold. note: what a reader should know of it, or nothing."""

    name: str
    value: float
    limit: float
    passed: bool
    note: str = ""

    @property
    def unit(self) -> Literal["nats", "share", "points"]:
        """Of value and limit."""
        if self.name.startswith("accuracy"):
            return "points"
        return "share" if self.name.startswith("perplexity") else "nats"


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks; passed if each is."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def judge(text: TextSummary | None, suites: Sequence[SuiteSummary], thresholds: Thresholds) -> Verdict:
    """text: None where none was scored. ComparisonError where no answers of the model could have failed."""
    limit = thresholds.max_accuracy_drop
    checks = [] if text is None else _text_checks(text, thresholds)
    checks += [_suite_check(suite.whole, limit) for suite in suites]
    assert checks, "nothing was measured"
    harmless = [_why_it_cannot_fail(suite.whole, limit) for suite in suites]
    if text is None and all(harmless):
        told = "; ".join(f"{suite.whole.name!r}: {why}" for suite, why in zip(suites, harmless, strict=True))
        raise ComparisonError(
            f"{TASKS_FLAG}: whatever the model answers passes ({told}); give more tasks that the baseline "
            f"gets right, or a text ({TEXT_FLAG}), or lower --max-accuracy-drop where it lets all be lost"
        )
    return Verdict(tuple(checks))


def _text_checks(text: TextSummary, thresholds: Thresholds) -> list[Check]:
    not_finite = "" if text.mean_kl == text.mean_kl else "logits are not finite"
    kl = Check(
        # The comparison this way round: NaN is at most nothing.
        "mean KL divergence",
        text.mean_kl,
        thresholds.max_kl,
        text.mean_kl <= thresholds.max_kl,
        not_finite,
    )
    increase, limit = text.perplexity_increase, thresholds.max_perplexity_increase
    low, high = text.perplexity_increase_interval
    is_small, may_be_chance = increase <= limit, low <= 0
    note = not_finite
    if may_be_chance and not is_small:
        note = f"may be chance ({100 * low:+.2f}% to {100 * high:+.2f}% at 95%); give more text"
    return [kl, Check("perplexity increase", increase, limit, is_small or may_be_chance, note)]


def _suite_check(whole: TaskSummary, limit: float) -> Check:
    drop, chance = whole.drop_points, whole.probability_by_chance
    is_large, is_certain = drop > limit, chance < 1 - CONFIDENCE
    note = ""
    if why := _why_it_cannot_fail(whole, limit):
        note = f"cannot fail: {why}; give more tasks"
    elif is_large and not is_certain:
        note = f"may be chance (p={chance:.2g}): {whole.num_lost} lost, {whole.num_won} won; give more tasks"
    elif is_large:
        note = f"not chance (p={chance:.2g}): {whole.num_lost} lost, {whole.num_won} won"
    return Check(f"accuracy drop, {whole.name}", drop, limit, not (is_large and is_certain), note)


def _why_it_cannot_fail(whole: TaskSummary, limit: float) -> str:
    """What a model passes by that loses all tasks which the baseline got right; "" where it fails."""
    chance = discordant_probability(whole.baseline_right, 0)
    right = f"the baseline got {whole.baseline_right} of {whole.num_tasks} right"
    if chance >= 1 - CONFIDENCE:
        return f"{right}, and losing all of them may be chance (p={chance:.2g})"
    if 100 * whole.baseline_right / whole.num_tasks <= limit:
        return f"{right}, and the limit of {limit:g} points lets it lose them all"
    return ""
