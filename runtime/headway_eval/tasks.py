"""Prompts with expected answers, from a file of JSON lines:

    {"prompt": "12+34=", "answer": "46"}
    {"messages": [{"role": "user", "content": "..."}], "answer": "Paris", "match": "contains", "kind": "fact"}

`match` says how answers are compared (`matching.py`, "exact" unless given), `kind` groups them in the table,
`max_tokens` bounds an answer; `id` is anybody's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_eval.errors import InputFileError
from headway_eval.input_rows import Row, read_rows
from headway_eval.matching import MATCHES, Match

FLAG = "--tasks"
KNOWN = ("prompt", "messages", "answer", "match", "kind", "max_tokens", "id")
DEFAULT_KIND = "all"
# As many as a request may ask for.
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Task:
    """prompt: a text to continue, or a chat. want: a text; for json the value.

    max_tokens: None is the flag's. place: where it was found.
    """

    place: str
    prompt: str | Sequence[Mapping[str, Any]]
    want: object
    match: Match
    kind: str
    max_tokens: int | None


def read_tasks(path: Path) -> list[Task]:
    tasks = [_task(row) for row in read_rows(FLAG, path)]
    if not tasks:
        raise InputFileError(
            f'{FLAG}={str(path)!r}: has no line; write objects like {{"prompt": "12+34=", "answer": "46"}}'
        )
    return tasks


def _task(row: Row) -> Task:
    row.refuse_unknown(KNOWN)
    name = row.only_one_of("prompt", "messages")
    match = row.fields.get("match", "exact")
    if match not in MATCHES:
        raise row.wrong("match", f"want one of {', '.join(MATCHES)}")
    kind = row.fields.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str) or not kind:
        raise row.wrong("kind", "want a text that is not empty")
    max_tokens = row.fields.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS):
        raise row.wrong("max_tokens", f"want an integer from 1 to {MAX_TOKENS}")
    prompt = row.text("prompt") if name == "prompt" else row.messages()
    return Task(row.place, prompt, _want(row, match), match, kind, max_tokens)


def _want(row: Row, match: Match) -> object:
    if "answer" not in row.fields:
        raise InputFileError(f"{row.place}: answer is missing; write the expected one")
    if match == "json":
        value = row.fields["answer"]
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.wrong("answer", f'is not JSON ({error}), as match "json" wants it') from error
    answer = row.text("answer")
    if match == "regex":
        try:
            re.compile(answer)
        except (re.error, OverflowError, RecursionError) as error:
            raise row.wrong("answer", f"is no regular expression ({error}); correct it") from error
    return answer
