"""Writes what `headway eval` judges the bundled models by: `python -m bundled_model.suites FOLDER`.

    bundled_tasks.jsonl   held-out tasks, each with the rule by which its answer is right
    bundled_text.jsonl    held-out chats with their right answers, long documents among them

Both are what `corpus` draws, so that nothing of them was trained on, and the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bundled_model.corpus import KINDS, RECALL_KINDS, Task, last_number, last_word, sample_tasks
from bundled_model.tokenizer import load_bundled_tokenizer

TASKS_NAME = "bundled_tasks.jsonl"
TEXT_NAME = "bundled_text.jsonl"
SEED = 23
NUM_TASKS = 24
NUM_STORIES = 8
# Few, because they are long; the rows that are looked up are what an 8-bit KV cache could lose.
NUM_RECALLS = 12
RECALL_TOKENS = 700
# Of each kind, in the text.
NUM_CHATS = 3
# Tokens that an answer may have beyond the right one's: its end, and something wrong.
SPARE_TOKENS = 8


def task_rows(seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The lines of the tasks' file."""
    tokenizer = load_bundled_tokenizer()
    for task in _draw(seed, NUM_TASKS, NUM_STORIES, NUM_RECALLS):
        match, answer = rule_of(task)
        yield {
            "kind": task.kind,
            **(
                {"messages": task.prompt_messages}
                if task.prompt_text is None
                else {"prompt": task.prompt_text}
            ),
            "answer": answer,
            "match": match,
            "max_tokens": len(tokenizer.encode(task.answer).ids) + SPARE_TOKENS,
        }


def text_rows(seed: int = SEED + 1) -> Iterator[dict[str, Any]]:
    """The lines of the text's file: chats with their answers, and plain completions."""
    for task in _draw(seed, NUM_CHATS, NUM_CHATS, NUM_CHATS):
        if task.prompt_text is None:
            yield {"messages": [*task.prompt_messages, {"role": "assistant", "content": task.answer}]}
        else:
            yield {"text": task.prompt_text + task.answer}


def rule_of(task: Task) -> tuple[str, str]:
    """(match, answer) that say of a text what `corpus.is_right` says."""
    if task.kind in RECALL_KINDS:
        return "regex", rf"(?:^|\s){re.escape(last_word(task.answer))}\.*\s*$"
    if task.kind in ("sum", "difference"):
        return "regex", rf"(?<![\d-]){last_number(task.answer)}\D*$"
    if task.kind in ("json", "extract"):
        return "json", task.answer
    return "exact", task.answer


def _draw(seed: int, count: int, num_stories: int, num_recalls: int) -> Iterator[Task]:
    for kind in KINDS:
        if kind in RECALL_KINDS:
            yield from sample_tasks(kind, seed, num_recalls, RECALL_TOKENS)
        else:
            yield from sample_tasks(kind, seed, num_stories if kind == "story" else count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bundled_model.suites", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the two files go")
    folder = parser.parse_args(arguments).folder
    for name, rows in ((TASKS_NAME, task_rows()), (TEXT_NAME, text_rows())):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} lines, {(folder / name).stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
