"""The tasks: repeatable, held out, and judged by content."""

from __future__ import annotations

from random import Random

import pytest

from bundled_model.corpus import KINDS, Task, is_right, sample_shared_document, sample_tasks
from bundled_model.drawing import is_held_out
from bundled_model.exchanges import CHAT_EXCHANGES
from bundled_model.packing import PROMPT_WEIGHT, Packer
from bundled_model.recipe import BROAD
from bundled_model.tokenizer import load_bundled_tokenizer

TOKENIZER = load_bundled_tokenizer()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_tasks_and_their_answers_are_right(kind: str) -> None:
    tasks = sample_tasks(kind, seed=3, count=10)
    assert tasks == sample_tasks(kind, seed=3, count=10)
    assert tasks != sample_tasks(kind, seed=4, count=10)
    assert all(is_right(task, task.answer) for task in tasks)
    assert not any(is_right(task, "") for task in tasks)


@pytest.mark.parametrize("length", [250, 1000, 2000])
def test_a_recall_document_has_at_least_the_wanted_tokens(length: int) -> None:
    for task in sample_tasks("recall", seed=1, count=5, context_tokens=length):
        num_tokens = sum(len(TOKENIZER.encode(message["content"]).ids) for message in task.prompt_messages)
        assert length <= num_tokens <= length + 80


def test_a_shared_document_stands_first_in_every_prompt() -> None:
    tasks = sample_shared_document(seed=2, count=6, context_tokens=300)
    first = [task.prompt_messages[0]["content"][:400] for task in tasks]
    assert len(set(first)) == 1
    assert len({task.prompt_messages[-1]["content"] for task in tasks}) > 1


@pytest.mark.parametrize(
    ("kind", "answer", "text", "want"),
    [
        ("recall", "The code of the map is 47.", "The map has code 47", True),
        ("recall", "The code of the map is 47.", "The code of the map is 74.", False),
        ("recall", "kite47", "kite47\n", True),
        ("sum", "12 + 34 = 46", "46", True),
        ("sum", "46", "12 + 34 = 45", False),
        ("sum", "46", "I do not know", False),
        ("json", '{"age": 3, "name": "Ada"}', '{"name":"Ada","age":3}', True),
        ("json", '{"age": 3}', '{"age": 3', False),
        ("copy", "a  b", "a b", False),
    ],
)
def test_answers_are_judged_by_what_they_say(kind: str, answer: str, text: str, *, want: bool) -> None:
    assert is_right(Task([], answer, kind), text) is want


@pytest.mark.parametrize("kind", sorted(set(CHAT_EXCHANGES) - {"fact", "unknown"}))
def test_training_never_draws_an_exchange_that_is_held_out(kind: str) -> None:
    draw = CHAT_EXCHANGES[kind]
    held_out = {draw(Random(seed), "held_out") for seed in range(400)}
    trained = {draw(Random(seed), "training") for seed in range(4000)}
    assert not held_out & trained


def test_about_one_content_in_eight_is_held_out() -> None:
    share = sum(is_held_out((first, second)) for first in range(100) for second in range(100)) / 10_000
    assert 0.1 < share < 0.15


def test_rows_weigh_answers_and_hardly_anything_else() -> None:
    batch = Packer(TOKENIZER).batch("a test", rows=4, length=512, mix=BROAD)
    assert batch.token_ids.shape == (4, 513)
    for token_ids, weights in zip(batch.token_ids, batch.weights, strict=True):
        predicted = TOKENIZER.decode(
            [int(i) for i, w in zip(token_ids[1:], weights, strict=True) if w == 1.0]
        )
        assert predicted
        assert "Calculate" not in predicted
    assert sorted(set(batch.weights.flatten().tolist())) == pytest.approx([PROMPT_WEIGHT, 1.0])


def test_unknown_kinds_and_needless_lengths_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="kind: 'riddle' is not known; use one of recall"):
        sample_tasks("riddle", 1, 1)
    with pytest.raises(ValueError, match="context_tokens: 500 makes no sense for 'sum'; leave it out"):
        sample_tasks("sum", 1, 1, 500)
