"""The step model from sums: found exactly where the world is linear, robust where it is not."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from headway_operator.slo.step_fit import (
    PATIENCE_INCREMENTS,
    StepFit,
    StepModel,
    Sums,
    learnt,
    nonnegative_least_squares,
)

TRUE = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=2e-5)
NOTHING: Sums = (0.0,) * 15


def sums(steps: Iterable[tuple[float, float, float, float]]) -> Sums:
    """Of steps (P, D, K, t), as a replica adds them up."""
    total = [0.0] * 15
    for p, d, k, t in steps:
        products = (1, p, d, k, p * p, p * d, p * k, d * d, d * k, k * k, t, t * p, t * d, t * k, t * t)
        total = [a + b for a, b in zip(total, products, strict=True)]
    return tuple(total)


def taken(
    chance: random.Random, count: int, model: StepModel = TRUE, noise: float = 0.0
) -> tuple[Sums, Sums]:
    """Steps without and with prompts of one replica between two passes."""
    level = chance.choice([2, 8, 30])

    def one(*, prompts: bool) -> tuple[float, float, float, float]:
        d = chance.randint(1, level)
        p, k = chance.randint(50, 2000) if prompts else 0, d * chance.randint(300, 2000)
        return p, d, k, model.milliseconds(p, d, k) * chance.uniform(1 - noise, 1 + noise)

    return sums(one(prompts=False) for _ in range(count)), sums(one(prompts=True) for _ in range(count // 4))


def learn(fit: StepFit, chance: random.Random, passes: int, **changes: float) -> StepFit:
    model = replace(TRUE, **changes)
    for _ in range(passes):
        fit = learnt(fit, [taken(chance, 100, model), taken(chance, 100, model)])
    return fit


def assert_close(model: StepModel | None, want: StepModel, relative: float) -> None:
    assert model is not None
    for one in ((0, 1, 500), (0, 30, 30_000), (2000, 20, 20_000)):
        assert model.milliseconds(*one) == pytest.approx(want.milliseconds(*one), rel=relative)


def test_a_linear_world_is_found_exactly() -> None:
    fit = learn(StepFit(), random.Random(1), 5)
    assert_close(fit.model, TRUE, 0.01)
    assert fit.residual < 0.01


def test_noise_of_a_tenth_moves_predictions_by_less_than_that() -> None:
    chance = random.Random(2)
    fit = StepFit()
    for _ in range(20):
        fit = learnt(fit, [taken(chance, 200, noise=0.1)])
    assert_close(fit.model, TRUE, 0.03)


def test_without_steps_that_computed_prompts_there_is_no_model() -> None:
    decode, _ = taken(random.Random(3), 500)
    assert learnt(StepFit(), [(decode, NOTHING)]).model is None


def test_prompts_spread_over_many_batch_sizes_are_not_free() -> None:
    chance = random.Random(9)
    sizes = [(1, 1), (2, 3), (4, 7), (8, 15)]

    def steps(least: int, most: int, *, prompts: bool, count: int) -> Sums:
        drawn = [
            (chance.randint(50, 2000) if prompts else 0, chance.randint(least, most)) for _ in range(count)
        ]
        return sums((p, d, 500.0 * d, TRUE.milliseconds(p, d, 500.0 * d)) for p, d in drawn)

    # Fifteen of each size: sixty steps with prompts, and no size has enough of them to be fitted.
    fit = learnt(
        StepFit(),
        [(steps(*size, prompts=False, count=100), steps(*size, prompts=True, count=15)) for size in sizes],
    )
    assert fit.model is None or fit.model.prefill > 0.5 * TRUE.prefill


def test_no_coefficient_is_negative_whatever_was_measured() -> None:
    """Steps that get shorter by more attended tokens, which no model should believe."""
    chance = random.Random(4)
    steps = [(0.0, float(d), 1000.0 * d + chance.random(), 20.0 - 0.1 * d) for d in range(1, 60)]
    prompts = [(p, d, k, t + 0.01 * p) for (_, d, k, t), p in zip(steps, range(50, 5000, 80), strict=False)]
    model = learnt(StepFit(), [(sums(steps), sums(prompts))]).model
    assert model is not None
    assert min(model.coefficients) >= 0.0


def test_one_hiccup_is_left_out() -> None:
    fit = learn(StepFit(), random.Random(5), 5)
    hiccup = sums([(0, 8, 8000, 12.0)] * 20 + [(0, 8, 8000, 5000.0)])
    after = learnt(fit, [(hiccup, NOTHING)])
    assert after.model == fit.model
    assert after.num_odd == (1, 0)


def test_steps_that_stay_different_are_believed_and_old_ones_forgotten() -> None:
    chance = random.Random(6)
    fit = learn(StepFit(), chance, 5)
    fit = learn(fit, chance, PATIENCE_INCREMENTS, base=40.0, prefill=0.2, sequence=1.0)
    assert_close(fit.model, StepModel(40.0, 0.2, 1.0, 2e-5), 0.02)


def test_begun_anew_on_steps_of_one_size_it_is_the_last_model_at_todays_speed() -> None:
    """A replica that has become four times as fast, of which one user alone asks for short answers."""
    chance = random.Random(7)
    fit = learn(StepFit(), chance, 5)
    fast = StepModel(*(one / 4 for one in TRUE.coefficients))

    def alone() -> tuple[Sums, Sums]:
        decodes = [(0, 1, k, fast.milliseconds(0, 1, k)) for k in (chance.randint(17, 32) for _ in range(60))]
        prompts = [(p, 0, 0, fast.milliseconds(p, 0, 0)) for p in (chance.randint(6, 9) for _ in range(6))]
        return sums(decodes), sums(prompts)

    for _ in range(60):
        fit = learnt(fit, [alone()])
    assert fit.is_anew
    assert fit.model is not None
    # What such steps do not tell: that a batch of 30 takes little more than one alone.
    assert fit.model.milliseconds(0, 30, 900) == pytest.approx(fast.milliseconds(0, 30, 900), rel=0.1)
    assert fit.model.milliseconds(8, 0, 0) == pytest.approx(fast.milliseconds(8, 0, 0), rel=0.1)
    again = StepFit.from_dict(fit.to_dict())
    assert_close(learn(again, chance, 20, **vars_of(fast)).model, fast, 0.02)


def vars_of(model: StepModel) -> dict[str, float]:
    return dict(zip(("base", "prefill", "sequence", "kv"), model.coefficients, strict=True))


def test_a_slow_drift_is_followed() -> None:
    chance = random.Random(7)
    fit = learn(StepFit(), chance, 5)
    fit = learn(fit, chance, 200, base=10.0)
    assert_close(fit.model, replace(TRUE, base=10.0), 0.03)


def test_the_fit_survives_a_checkpoint() -> None:
    fit = learn(StepFit(), random.Random(8), 3)
    assert StepFit.from_dict(fit.to_dict()) == fit


def test_least_squares_without_negative_entries_are_the_best_of_a_grid() -> None:
    """Held against all points of a grid, of which none may be better."""
    chance = random.Random(9)
    for _ in range(20):
        rows = [[chance.uniform(-1, 1) for _ in range(3)] for _ in range(6)]
        right = [chance.uniform(-1, 1) for _ in range(6)]
        gram = [[sum(r[i] * r[j] for r in rows) for j in range(3)] for i in range(3)]
        cross = [sum(r[i] * t for r, t in zip(rows, right, strict=True)) for i in range(3)]

        def value(x: list[float], gram: list[list[float]] = gram, cross: list[float] = cross) -> float:
            square = sum(x[i] * x[j] * gram[i][j] for i in range(3) for j in range(3))
            return square - 2 * sum(c * one for c, one in zip(cross, x, strict=True))

        found = nonnegative_least_squares(gram, cross)
        assert min(found) >= 0.0
        points = [k / 4 for k in range(9)]
        assert value(found) <= min(value([a, b, c]) for a in points for b in points for c in points) + 1e-9


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"base": 0.54 * 8.3, "sequence": 0.1}, id="of decodes"),
        pytest.param({"prefill": 0.15}, id="of prompts"),
    ],
)
def test_a_change_of_one_kind_of_steps_is_believed_although_the_other_is_as_ever(
    changed: dict[str, float],
) -> None:
    """Weights of fewer bits, whose products of many tokens are no faster; or a kernel that is slower."""
    chance = random.Random(8)
    fit = learn(StepFit(), chance, 5)
    fit = learn(fit, chance, PATIENCE_INCREMENTS, **changed)
    assert_close(fit.model, replace(TRUE, **changed), 0.02)


@pytest.mark.parametrize("times", [1.7, 0.6])
def test_sizes_that_never_come_again_do_not_hold_the_model_back(times: float) -> None:
    """All steps take another time, by less than what would be called odd; those of a large batch were the
    last of their size."""
    chance = random.Random(10)
    fit, now = learn(StepFit(), chance, 5), TRUE.slower(times)

    def small() -> tuple[Sums, Sums]:
        decodes = [(0, d, 500.0 * d, now.milliseconds(0, d, 500.0 * d)) for d in (1, 2, 3, 4) * 10]
        prompts = [(p, 1, 500.0, now.milliseconds(p, 1, 500.0)) for p in (100, 400, 1600) * 4]
        return sums(decodes), sums(prompts)

    for _ in range(100):
        fit = learnt(fit, [small()])
    assert fit.model is not None
    assert fit.model.milliseconds(0, 3, 1500) == pytest.approx(now.milliseconds(0, 3, 1500), rel=0.03)


def test_one_pass_of_a_large_fleet_is_no_long_time() -> None:
    """All replicas of a fleet are slow at once, as when their disks are; it is the first pass of it."""
    fit = learn(StepFit(), random.Random(11), 5)
    slow = learnt(
        fit, [taken(random.Random(12), 100, TRUE.slower(3.0)) for _ in range(2 * PATIENCE_INCREMENTS)]
    )
    assert slow.model == fit.model
    assert not slow.is_anew
    assert learn(slow, random.Random(13), 1).num_odd == (0, 0)


def test_a_pass_counts_as_little_after_an_increment_that_was_as_ever() -> None:
    odd, fine = taken(random.Random(14), 100, TRUE.slower(3.0)), taken(random.Random(15), 100)
    fit = replace(learn(StepFit(), random.Random(16), 5), num_odd=(16, 16))
    assert learnt(fit, [fine, *[odd] * 23]).num_odd == (8, 8)
    assert learnt(fit, [odd]).num_odd == (17, 17)


def test_checkpoints_of_either_version_are_read_by_the_other() -> None:
    told = replace(StepFit(model=TRUE), num_odd=(3, 9)).to_dict()
    assert StepFit.from_dict(told).num_odd == (3, 9)
    assert isinstance(told["num_odd"], int)
    del told["num_odd_of_kinds"]
    assert StepFit.from_dict(told).num_odd == (0, 0)


def test_a_first_model_needs_no_size_of_batch_often_enough() -> None:
    """Prompts came beside unlike numbers of sequences, beside none of these twenty times."""
    chance = random.Random(7)

    def steps(sequences: int, count: int, *, prompts: bool) -> list[tuple[float, float, float, float]]:
        made: list[tuple[float, float, float, float]] = []
        for _ in range(count):
            p, k = chance.randint(50, 2000) if prompts else 0, sequences * chance.randint(300, 2000)
            made.append((p, sequences, k, TRUE.milliseconds(p, sequences, k)))
        return made

    decodes = sums(steps(2, 50, prompts=False)), NOTHING
    few = [(NOTHING, sums(steps(sequences, 13, prompts=True))) for sequences in (1, 4, 16)]
    fit = learnt(StepFit(), [decodes, *few])
    assert fit.model is None, "39 with prompts are too few"
    fit = learnt(fit, [(NOTHING, sums(steps(1, 1, prompts=True)))])
    assert_close(fit.model, TRUE, 0.01)
    assert sorted(fit.buckets) == ["d2", "p1", "p3", "p5"], "they are kept apart"
