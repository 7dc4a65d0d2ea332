"""The text that both models are scored on: a file of plain text, or of JSON lines.

A line of JSON has `text`, or `messages`, which the model's chat template writes out; other fields are left
alone, as data sets have many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_eval.errors import InputFileError
from headway_eval.input_rows import read_rows, read_text

FLAG = "--text"
JSON_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Text:
    """One text, or one chat. place: where it was found."""

    place: str
    content: str | Sequence[Mapping[str, Any]]


def read_texts(path: Path) -> list[Text]:
    """A file whose name ends in .jsonl is read line by line; any other is one text."""
    if path.suffix.lower() not in JSON_SUFFIXES:
        content = read_text(FLAG, path)
        if not content.strip():
            raise InputFileError(f"{FLAG}={str(path)!r}: is empty; name a file with text")
        return [Text(f"{FLAG}={str(path)!r}", content)]
    texts = []
    for row in read_rows(FLAG, path):
        name = row.only_one_of("text", "messages")
        texts.append(Text(row.place, row.text(name) if name == "text" else row.messages()))
    if not texts:
        raise InputFileError(
            f'{FLAG}={str(path)!r}: has no line; write objects like {{"text": "..."}}, one on each line'
        )
    return texts
