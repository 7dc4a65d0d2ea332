"""Lines of text as lines of fields: CSV and JSON lines. It knows no format's fields.

Nothing is held but the line under way. `called` is what errors call the file.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from typing import Any

from headway_traces.line import Line, TraceFileError


def csv_columns(first: str) -> tuple[str, ...]:
    """What the first line calls them, without blanks around; none where it is no CSV."""
    try:
        return tuple(name.strip() for name in next(csv.reader([first], skipinitialspace=True)))
    except csv.Error:
        return ()


def csv_lines(called: str, columns: tuple[str, ...], num_before: int, lines: Iterable[str]) -> Iterator[Line]:
    """Of what follows the columns; num_before: lines up to and with those."""
    reader = csv.reader(lines, skipinitialspace=True)
    ended = num_before
    try:
        for row in reader:
            ended = num_before + reader.line_num
            if len(row) <= 1 and not "".join(row).strip():
                continue
            if len(row) > len(columns):
                raise TraceFileError(
                    f"{called}, line {ended} has {row[len(columns) :]!r:.80} beyond the {len(columns)} "
                    "columns of the first line; correct it, or leave the line out"
                )
            yield Line(called, ended, dict(zip(columns, row, strict=False)))
    except csv.Error as error:
        raise TraceFileError(
            f"{called}, line {ended + 1} is no CSV: {error}; correct it, or leave the line out"
        ) from error


def json_lines(called: str, numbered: Iterable[tuple[int, str]]) -> Iterator[Line]:
    """Of the lines that are not blank."""
    for number, text in numbered:
        if text.strip():
            yield json_line(called, number, text)


def json_line(called: str, number: int, text: str) -> Line:
    """Of a line with an object."""
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(
            f"{called}, line {number} is no JSON: {error}; correct it, or leave the line out"
        ) from error
    if not isinstance(row, dict):
        raise TraceFileError(
            f"{called}, line {number} is no JSON object: {text.strip()[:80]}; write one a line"
        )
    return Line(called, number, row, is_json=True)
