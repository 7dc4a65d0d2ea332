"""What ships is what the bundled corpus draws, and its rules say what the corpus itself says."""

import json

import pytest

from bundled_model.corpus import KINDS, is_right, sample_tasks
from bundled_model.suites import rule_of, task_rows, text_rows
from headway_eval import matching
from headway_eval.bundled_suite import TASKS_PATH, TEXT_PATH
from headway_eval.tasks import read_tasks
from headway_eval.texts import read_texts


def test_the_files_are_what_the_script_writes() -> None:
    for path, rows in ((TASKS_PATH, task_rows()), (TEXT_PATH, text_rows())):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == list(rows), (
            f"{path.name} is out of date; in runtime/, run python -m bundled_model.suites headway_eval/suites"
        )


def test_the_files_are_readable_and_hold_every_kind() -> None:
    assert {task.kind for task in read_tasks(TASKS_PATH)} == set(KINDS)
    assert len(read_texts(TEXT_PATH)) > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_says_of_an_answer_what_the_corpus_says(kind: str) -> None:
    tasks = sample_tasks(kind, 5, 6)
    answers = [task.answer for task in tasks]
    spellings = [*answers, *(f" {one}\n" for one in answers), *(one + "." for one in answers)]
    spellings += ["", "nonsense", "-46", *(one[:-1] for one in answers), *("1" + one for one in answers)]
    spellings += [one + "7" for one in answers]
    seen = set()
    for task in tasks:
        match, answer = rule_of(task)
        want = json.loads(answer) if match == "json" else answer
        for text in spellings:
            right = matching.is_right(match, want, text)  # type: ignore[arg-type]
            assert right == is_right(task, text), (task.answer, text)
            seen.add(right)
    assert seen == {True, False}
