"""Reads conversations from a data set in ShareGPT's shape; neither counts nor cuts them.

A JSON array or JSON lines of objects with `conversations` (`from`: human, user, gpt or assistant; `value`) or
`messages` (`role`, `content`). Used are the turns that follow each other as question and answer; system
messages and whatever follows the first break of that order are left out.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_bench.errors import InputFileError

_ASKING = {"human", "user"}
_ANSWERING = {"gpt", "assistant", "chatgpt", "bing", "bard"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked and what was answered."""

    question: str
    answer: str


def read_dataset(path: Path) -> tuple[tuple[Exchange, ...], ...]:
    """The conversations that have at least one question with its answer, in the file's order."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(f"--dataset {str(path)!r} cannot be read: {error}") from error
    conversations = tuple(
        exchanges for row in _rows(path, text) if (exchanges := tuple(_exchanges(path, row)))
    )
    if not conversations:
        raise InputFileError(
            f"--dataset {str(path)!r} has no conversation; each needs `conversations` (from, value) "
            "or `messages` (role, content)"
        )
    return conversations


def _rows(path: Path, text: str) -> Iterable[Any]:
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InputFileError(f"--dataset {str(path)!r} is no JSON: {error}") from error
    assert isinstance(rows, list)
    return rows


def _exchanges(path: Path, row: Any) -> Iterator[Exchange]:
    if not isinstance(row, dict):
        raise InputFileError(f"--dataset {str(path)!r} holds {row!r:.80} where an object should be")
    turns = [
        (str(turn.get("from", turn.get("role"))), turn.get("value", turn.get("content")))
        for turn in row.get("conversations") or row.get("messages") or ()
        if isinstance(turn, dict)
    ]
    spoken = [(speaker, text) for speaker, text in turns if speaker not in ("system", "tool")]
    for (asker, question), (answerer, answer) in zip(spoken[::2], spoken[1::2], strict=False):
        if asker not in _ASKING or answerer not in _ANSWERING:
            return
        if not (isinstance(question, str) and isinstance(answer, str) and question and answer):
            return
        yield Exchange(question, answer)
