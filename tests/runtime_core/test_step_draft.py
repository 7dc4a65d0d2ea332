"""A step in the making: what a lone prompt gets of it."""

import random

import pytest

from headway_runtime.prompt_cost import PromptCost
from headway_runtime.request import Request, SamplingParams
from headway_runtime.sequence import Sequence
from headway_runtime.step_draft import StepDraft


@pytest.mark.parametrize("seed", range(200))
def test_a_prompt_alone_gets_its_first_part_and_all_that_is_left(seed: int) -> None:
    chance = random.Random(seed)
    cost = PromptCost(chance.choice([0, 3, 200, 10_000]))
    budget, largest = chance.randint(1, 300), chance.randint(1, 200)
    sequence = Sequence(Request("a", (7,) * chance.randint(2, 2000), SamplingParams(max_tokens=1), 0.0), 0)
    sequence.num_computed = chance.randrange(sequence.num_prompt)
    draft = StepDraft(budget, largest, largest, cost)
    alone = draft.part_alone(sequence.num_computed, sequence.num_pending)
    draft.give_prompt(sequence)
    draft.give_rest()
    assert draft.shares == {sequence: alone}
