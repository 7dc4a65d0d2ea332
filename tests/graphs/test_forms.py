"""Which kinds of steps are recorded, in which sizes and order, and what memory is set aside for them."""

from dataclasses import replace

import pytest

from headway_runtime.config import EngineConfig, Envelope, Limits, SpeculativeConfig
from headway_runtime.graphs.forms import FormPlan, StepForm, draft_forms, model_forms
from headway_runtime.graphs.opening import BYTES_OF_POOL, BYTES_PER_GRAPH, GraphPlan
from headway_runtime.graphs.sizes import doubling


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(
        model_path="",
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=4096,
        block_size=16,
        kv_cache_memory_bytes=None,
        envelope=Envelope(64, 2048),
        limits=Limits(64, 2048),
        max_waiting=100,
        num_threads=1,
    )


def guessing(config: EngineConfig, most: int, num_tokens: int) -> EngineConfig:
    return replace(config, envelope=Envelope(most, 2048, num_tokens), speculative=SpeculativeConfig("ngram"))


def rows_of(plan: FormPlan, *, has_several: bool = False, draws: bool = True) -> list[int]:
    """In the order in which they are recorded."""
    kind = (has_several, draws)
    return [form.num_rows for form in plan.forms if (form.has_several, form.draws) == kind]


def test_plain_decodes_have_many_sizes_and_the_other_kinds_few(config: EngineConfig) -> None:
    plan = model_forms(config)

    assert sorted(rows_of(plan)) == [1, 2, 4, *range(8, 65, 8)]
    assert rows_of(plan, draws=False) == [64, 32, 16, 8, 4, 2, 1]
    assert rows_of(plan, has_several=True) == rows_of(plan, has_several=True, draws=False) == []
    assert doubling(6) == (1, 2, 4, 6)
    assert doubling(1) == (1,)


def test_what_ends_in_logits_is_recorded_last_and_never_before_the_first_request(
    config: EngineConfig,
) -> None:
    plan = model_forms(guessing(config, 64, 3))

    assert all(form.draws for form in plan.first)
    draws = [form.draws for form in plan.forms]
    assert draws == sorted(draws, reverse=True)
    # The largest of all makes the memory that the others share.
    assert [form.num_rows for form in plan.first] == [256, 64, 64, 16, 16, 4, 4, 2, 1]


def test_guesses_are_rows_and_no_more_than_a_step_may_have(config: EngineConfig) -> None:
    assert max(rows_of(model_forms(guessing(config, 64, 3)), has_several=True)) == 256
    # Beyond, a step keeps a GPU busy by itself.
    assert max(rows_of(model_forms(guessing(config, 256, 4)), has_several=True)) == 512
    tight = replace(guessing(config, 16, 7), envelope=Envelope(16, 100, 7))
    assert max(rows_of(model_forms(tight), has_several=True)) == 100


def test_sizes_that_are_named_are_of_sequences(config: EngineConfig) -> None:
    plan = model_forms(replace(guessing(config, 64, 3), cuda_graph_sizes=(1, 8)))

    assert sorted(rows_of(plan)) == sorted(rows_of(plan, draws=False)) == [1, 8]
    assert sorted(rows_of(plan, has_several=True)) == [4, 32]
    assert model_forms(replace(config, cuda_graph_sizes=())) == FormPlan()


def test_a_draft_model_passes_one_token_or_two_of_each_sequence(config: EngineConfig) -> None:
    plan = draft_forms(replace(config, envelope=Envelope(8, 2048, 3)))

    assert sorted(rows_of(plan)) == [1, 2, 4, 8]
    assert sorted(rows_of(plan, has_several=True)) == [2, 4, 8, 16]
    assert all(form.draws for form in plan.forms)


def test_memory_is_set_aside_for_the_largest_step_each_recording_and_logits() -> None:
    assert GraphPlan().reserved_bytes(10**9, 8, 10**6) == 0
    plain = GraphPlan(FormPlan((StepForm(8),), (StepForm(4), StepForm(4, draws=False))))
    assert plain.reserved_bytes(10**9, 8, 10**6) == BYTES_OF_POOL + 10**9 + 3 * BYTES_PER_GRAPH + 4 * 10**6
    # More rows than were measured take more in proportion; a draft's share memory with the model's.
    both = GraphPlan(FormPlan((StepForm(24, has_several=True),)), FormPlan((StepForm(8),)))
    assert both.reserved_bytes(10**9, 8, 10**6) == BYTES_OF_POOL + 3 * 10**9 + 2 * BYTES_PER_GRAPH
