"""The committed weights answer a fixed held-out sample as well as their model card promises."""

from __future__ import annotations

import pytest

from bundled_model.corpus import sample_tasks
from bundled_model.judging import Judged, accuracy, agreement, greedy_answers

SEED = 11


@pytest.mark.parametrize(
    ("kind", "context_tokens", "count", "want"),
    [
        ("recall", 1000, 32, 0.95),
        ("passage", 1000, 16, 0.90),
        ("recall", 2000, 8, 0.85),
        ("sum", None, 60, 0.95),
        ("difference", None, 40, 0.90),
        ("copy", None, 32, 0.85),
        ("count", None, 12, 0.75),
        ("json", None, 32, 0.90),
        ("extract", None, 16, 0.90),
        ("fact", None, 32, 0.80),
        ("story", None, 4, 0.75),
        ("unknown", None, 16, 0.90),
        ("memory", None, 16, 0.90),
        ("completion", None, 32, 0.85),
    ],
)
def test_greedy_answers_are_right(
    target: Judged, kind: str, context_tokens: int | None, count: int, want: float
) -> None:
    tasks = sample_tasks(kind, SEED, count, context_tokens)
    answers = greedy_answers(target, tasks)
    wrong = [
        (task.answer, answer.text)
        for task, answer in zip(tasks, answers, strict=True)
        if answer.text.strip() != task.answer.strip()
    ]
    assert accuracy(tasks, answers) >= want, wrong[:5]


def test_the_draft_agrees_with_the_target_on_most_tokens(target: Judged, draft: Judged) -> None:
    same = total = 0
    for kind in ("recall", "sum", "copy", "count", "json", "fact", "unknown"):
        answers = greedy_answers(target, sample_tasks(kind, SEED, 12))
        num_same, num_tokens = agreement(draft, answers)
        same, total = same + num_same, total + num_tokens
    assert same / total >= 0.60


def test_hello_and_a_capital_are_answered_as_a_person_would_expect(target: Judged) -> None:
    questions = {
        "Hello": "Hello! How can I help you?",
        "What is the capital of France?": "The capital of France is Paris.",
        "How do you say hello in Japanese?": "こんにちは",
        "Show me the emoji: family": "👨‍👩‍👧",
    }
    for question, want in questions.items():
        prompt = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], return_tensors="pt", add_generation_prompt=True
        )
        output = target.model.generate(**prompt, max_new_tokens=30, do_sample=False)
        text = target.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == want
