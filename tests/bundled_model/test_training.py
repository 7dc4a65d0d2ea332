"""The training itself, for a few steps: it learns, it repeats by seed, it goes on from a checkpoint."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from bundled_model.export import load_exported
from bundled_model.network import DRAFT_NAME, TARGET_NAME
from bundled_model.optimizer import orthogonalized
from bundled_model.recipe import FINISHING_FROM, Recipe, recipe_of
from bundled_model.train import main, new_trainer

SMALL = Recipe(steps=20, warmup_steps=2, tokens_per_step=512)


def test_twenty_steps_of_the_target_lower_the_loss_and_repeat_by_seed() -> None:
    losses = list(new_trainer(TARGET_NAME, SMALL, seed=5).losses())
    assert len(losses) == 20
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0
    again = list(islice(new_trainer(TARGET_NAME, SMALL, seed=5).losses(), 4))
    assert again == losses[:4]
    other = list(islice(new_trainer(TARGET_NAME, SMALL, seed=6).losses(), 4))
    assert other != losses[:4]


def test_a_run_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path: Path) -> None:
    straight = new_trainer(DRAFT_NAME, SMALL, seed=5)
    want = list(straight.losses())
    stopped = new_trainer(DRAFT_NAME, SMALL, seed=5)
    losses = stopped.losses()
    for _ in range(8):
        next(losses)
    stopped.save(tmp_path / "checkpoint")
    resumed = new_trainer(DRAFT_NAME, SMALL, seed=5)
    resumed.load(tmp_path / "checkpoint")
    assert list(resumed.losses()) == want[8:]


def test_two_workers_and_a_teacher_export_a_draft_that_loads(tmp_path: Path, target_directory: Path) -> None:
    options = ["--model", DRAFT_NAME, "--steps", "2", "--tokens-per-step", "1024", "--workers", "2"]
    paths = ["--teacher", str(target_directory), "--checkpoint", str(tmp_path / "checkpoint")]
    status = main([*options, *paths, "--checkpoint-every", "2", "--output", str(tmp_path / "draft")])
    assert status == 0
    assert torch.load(tmp_path / "checkpoint", weights_only=True)["step"] == 2
    assert load_exported(tmp_path / "draft").shape.hidden_size == 128


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)], ids=["square", "wide", "tall"])
def test_orthogonalized_updates_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    singular_values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, generator=generator)))
    assert singular_values.min() > 0.3
    assert singular_values.max() < 1.4


def test_rates_warm_up_keep_the_stage_and_decay_twice() -> None:
    recipe = recipe_of(TARGET_NAME, 2150, 8192)
    factors = [recipe.rate_factor(step) for step in range(2150)]
    assert factors[0] == pytest.approx(1 / 50)
    assert factors[49:800] == [1.0] * 751
    assert set(factors[800:1000]) == {0.4}
    assert set(factors[1000:1313]) == {0.5}
    assert factors[1313:FINISHING_FROM] == sorted(factors[1313:FINISHING_FROM], reverse=True)
    assert factors[FINISHING_FROM - 1] == pytest.approx(0.5 / 437.5)
    assert factors[FINISHING_FROM] == 0.35
    assert factors[FINISHING_FROM:] == sorted(factors[FINISHING_FROM:], reverse=True)
    assert factors[-1] == pytest.approx(0.35 / 400)


def test_rows_are_short_until_looking_back_is_learned_and_the_longest_come_last() -> None:
    recipe = recipe_of(TARGET_NAME, 2150, 8192)
    lengths = [recipe.row_length(1, step) for step in range(2150)]
    assert set(lengths[:800]) == {256}
    assert set(lengths[1000:1200]) == {256}
    assert 0.4 < lengths[1400:FINISHING_FROM].count(1280) / 350 < 0.6
    assert set(lengths[FINISHING_FROM:]) == {256, 1280, 2304}
