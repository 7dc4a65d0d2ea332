"""Judges exported models on held-out tasks: `python -m bundled_model.evaluate DIRECTORY [--draft DIRECTORY]`.

Prints accuracy per task, and per task the draft's greedy agreement with the target; `--output` writes
the same as JSON, from which the model cards are made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bundled_model.corpus import KINDS, RECALL_KINDS, Task, sample_tasks
from bundled_model.judging import Judged, accuracy, agreement, greedy_answers, load_judged


@dataclass(frozen=True, slots=True)
class Suite:
    """One line of the table."""

    name: str
    kind: str
    context_tokens: int | None = None


SUITES = (
    *(
        Suite(f"{kind} at {length} tokens", kind, length)
        for kind in RECALL_KINDS
        for length in (250, 1000, 2000)
    ),
    *(Suite(kind, kind) for kind in KINDS if kind not in RECALL_KINDS),
)


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one suite; the last two are of the draft, zero where none was given."""

    name: str
    num_tasks: int
    accuracy: float
    draft_accuracy: float = 0.0
    agreement: float = 0.0


def score(suite: Suite, target: Judged, draft: Judged | None, seed: int, count: int) -> Score:
    tasks: list[Task] = sample_tasks(suite.kind, seed, count, suite.context_tokens)
    answers = greedy_answers(target, tasks)
    right = accuracy(tasks, answers)
    if draft is None:
        return Score(suite.name, count, right)
    num_same, num_tokens = agreement(draft, answers)
    return Score(
        suite.name, count, right, accuracy(tasks, greedy_answers(draft, tasks)), num_same / num_tokens
    )


def show_mistakes(suite: Suite, target: Judged, seed: int, count: int) -> None:
    """Print the wrong answers of a suite beside the right ones."""
    from bundled_model.corpus import is_right

    tasks = sample_tasks(suite.kind, seed, count, suite.context_tokens)
    for task, answer in zip(tasks, greedy_answers(target, tasks), strict=True):
        if not is_right(task, answer.text):
            question = task.prompt_text or task.prompt_messages[-1]["content"][-120:]
            print(f"  {suite.name}: {question!r} -> {answer.text!r}, want {task.answer!r}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bundled_model.evaluate", description=__doc__)
    parser.add_argument("target", type=Path, help="exported model directory")
    parser.add_argument("--draft", type=Path, help="exported draft directory")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=200, help="held-out tasks per line")
    parser.add_argument("--only", help="judge only the lines whose name contains this")
    parser.add_argument("--mistakes", action="store_true", help="also print the wrong answers")
    parser.add_argument("--output", type=Path, help="file for the scores as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    target = load_judged(options.target)
    draft = load_judged(options.draft) if options.draft else None
    scores = []
    for suite in SUITES:
        if options.only and options.only not in suite.name:
            continue
        scores.append(score(suite, target, draft, options.seed, options.count))
        last = scores[-1]
        print(
            f"{last.name:24} {last.accuracy:6.1%}  draft {last.draft_accuracy:6.1%}  "
            f"agreement {last.agreement:6.1%}",
            flush=True,
        )
        if options.mistakes:
            show_mistakes(suite, target, options.seed, min(options.count, 40))
    if options.output:
        content = {"seed": options.seed, "scores": [asdict(one) for one in scores]}
        options.output.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
