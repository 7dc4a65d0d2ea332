"""Trace files; which format a file has, its first line tells.

    {"at_seconds": ..., "prompt_tokens": ..., "output_tokens": ...}   our own, JSON lines; docs/simulate.md
    TIMESTAMP,ContextTokens,GeneratedTokens             Azure LLM inference 2023 and 2024, CSV: a request each
    {"timestamp": ms, "input_length": ..., ...}         Mooncake, JSON lines; `hash_ids` are 512-token blocks
    {"chat_id": ..., "timestamp": s, ...}               Qwen-Bailian, the same with seconds and 16 tokens
    start_seconds,requests_per_second,...               rates by window, CSV; `rate_weighted_cv` may follow

Times become relative to the first row. Every row is checked; an error names line, field and value.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from headway_traces.line import Line, TraceFileError

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
PUBLISHED_FIELDS = ("timestamp", "input_length", "output_length")
# What only Qwen-Bailian's rows have. Their other fields are not read: a later turn comes when it was recorded
# to come, and what it shares with the one before is in its hash ids.
BAILIAN_FIELD = "chat_id"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RATE_COLUMNS = ("start_seconds", "requests_per_second")
OWN_FIELDS = ("at_seconds", "prompt_tokens", "output_tokens")
OWN_OPTIONAL_FIELDS = ("hash_ids", "hash_block_tokens")
# A time without a zone is only ever compared with others of the same file.
EPOCH, UNZONED_EPOCH = datetime(1970, 1, 1, tzinfo=UTC), datetime(1970, 1, 1)  # noqa: DTZ001

RowReader = Callable[[Line], "TraceRequest"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as it was recorded.

    hash_ids: of the prompt's blocks of `block_tokens`, the last one perhaps cut off; equal ids at the front
    of two prompts mean equal tokens there.
    """

    at_seconds: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class RateWindow:
    """How fast requests came in [start, end); `coefficient_of_variation` of the gaps, where recorded."""

    start_seconds: float
    end_seconds: float
    requests_per_second: float
    coefficient_of_variation: float | None


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file's rows by time: either requests or windows, the other is empty. The only window of a file has no
    end."""

    format_name: str
    requests: tuple[TraceRequest, ...] = ()
    windows: tuple[RateWindow, ...] = ()


def read_trace_file(path: Path, called: str) -> TraceFile:
    """What is in `path`, which errors are to call so. Raises TraceFileError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{called} cannot be read: {error}") from error
    number, first = next(
        ((number, line) for number, line in enumerate(lines, start=1) if line.strip()), (1, "")
    )
    if not first:
        raise TraceFileError(f"{called} is empty; give a file with a line for each request")
    if first.lstrip().startswith("{"):
        name, read = _json_format(called, number, first)
        return _requests(name, called, map(read, _json_lines(called, lines)))
    columns = _columns(first)
    if set(columns) >= set(AZURE_COLUMNS):
        return _requests("azure", called, _azure_rows(_csv_lines(called, columns, lines)))
    if set(columns) >= set(RATE_COLUMNS):
        return TraceFile("rates", windows=_windows(called, _csv_lines(called, columns, lines)))
    raise _unknown(called, first)


def _unknown(called: str, first: str) -> TraceFileError:
    return TraceFileError(
        f"{called} begins with {first[:80]!r}, which no known format does; give an Azure CSV, Mooncake's or "
        f"Qwen-Bailian's JSON lines, JSON lines with {', '.join(OWN_FIELDS)}, or a CSV of "
        f"{','.join(RATE_COLUMNS)}"
    )


def _json_format(called: str, number: int, first: str) -> tuple[str, RowReader]:
    """By the fields of the first row; one that lacks a field is still taken for what its others tell."""
    fields = _json_object(f"{called}, line {number}", first).keys()
    if fields & set(OWN_FIELDS):
        return "headway", _own_row
    if not fields & set(PUBLISHED_FIELDS):
        raise _unknown(called, first)
    if BAILIAN_FIELD in fields:
        return "bailian", partial(_published_row, units_per_second=1, block_tokens=BAILIAN_BLOCK_TOKENS)
    return "mooncake", partial(_published_row, units_per_second=1000, block_tokens=MOONCAKE_BLOCK_TOKENS)


def _requests(format_name: str, called: str, rows: Iterator[TraceRequest]) -> TraceFile:
    ordered = sorted(rows, key=lambda request: request.at_seconds)
    if not ordered:
        raise TraceFileError(f"{called} holds no request")
    first = ordered[0].at_seconds
    return TraceFile(format_name, tuple(replace(one, at_seconds=one.at_seconds - first) for one in ordered))


def _columns(first: str) -> tuple[str, ...]:
    """What a CSV calls them, without blanks around; none where it is no CSV."""
    try:
        return tuple(name.strip() for name in next(csv.reader([first], skipinitialspace=True)))
    except csv.Error:
        return ()


def _csv_lines(called: str, columns: tuple[str, ...], lines: Sequence[str]) -> Iterator[Line]:
    """What follows the first line that is not blank."""
    num_before = next(number for number, line in enumerate(lines, start=1) if line.strip())
    reader = csv.reader(lines[num_before:], skipinitialspace=True)
    ended = num_before
    try:
        for row in reader:
            ended = num_before + reader.line_num
            if len(row) <= 1 and not "".join(row).strip():
                continue
            place = f"{called}, line {ended}"
            if len(row) > len(columns):
                raise TraceFileError(
                    f"{place} has {row[len(columns) :]!r:.80} beyond the {len(columns)} columns of the first "
                    "line; correct it, or leave the line out"
                )
            yield Line(place, dict(zip(columns, row, strict=False)))
    except csv.Error as error:
        raise TraceFileError(
            f"{called}, line {ended + 1} is no CSV: {error}; correct it, or leave the line out"
        ) from error


def _json_lines(called: str, lines: Sequence[str]) -> Iterator[Line]:
    for number, text in enumerate(lines, start=1):
        if text.strip():
            place = f"{called}, line {number}"
            yield Line(place, _json_object(place, text), is_json=True)


def _json_object(place: str, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{place} is no JSON: {error}; correct it, or leave the line out") from error
    if not isinstance(row, dict):
        raise TraceFileError(f"{place} is no JSON object: {text.strip()[:80]}; write one a line")
    return row


def _azure_rows(lines: Iterator[Line]) -> Iterator[TraceRequest]:
    """Zoned times are instants, whatever their offsets; beside those an unzoned one says nothing."""
    is_zoned: bool | None = None
    for line in lines:
        at = _azure_time(line)
        if is_zoned is None:
            is_zoned = at.tzinfo is not None
        elif is_zoned != (at.tzinfo is not None):
            known = "with" if is_zoned else "without"
            raise line.error("TIMESTAMP", f"a time {known} a zone, as those of the lines before are")
        yield TraceRequest(
            (at - (EPOCH if is_zoned else UNZONED_EPOCH)).total_seconds(),
            line.recorded_tokens("ContextTokens"),
            line.recorded_tokens("GeneratedTokens"),
        )


def _azure_time(line: Line) -> datetime:
    try:
        return datetime.fromisoformat(str(line.value("TIMESTAMP")).strip())
    except ValueError as error:
        raise line.error("TIMESTAMP", "a time as 2023-11-16 18:15:46.68") from error


def _published_row(line: Line, *, units_per_second: int, block_tokens: int) -> TraceRequest:
    lengths = line.recorded_tokens("input_length"), line.recorded_tokens("output_length")
    at = line.number("timestamp") / units_per_second
    return TraceRequest(at, *lengths, line.hash_ids(), block_tokens)


def _own_row(line: Line) -> TraceRequest:
    line.has_only({*OWN_FIELDS, *OWN_OPTIONAL_FIELDS})
    return TraceRequest(
        line.number("at_seconds", 0),
        line.tokens("prompt_tokens"),
        line.tokens("output_tokens"),
        line.hash_ids(),
        MOONCAKE_BLOCK_TOKENS
        if line.fields.get("hash_block_tokens") is None
        else line.tokens("hash_block_tokens"),
    )


def _windows(called: str, lines: Iterator[Line]) -> tuple[RateWindow, ...]:
    """Each lasts until the next begins; the last one as long as the one before it."""
    seen: list[tuple[float, float, float | None]] = []
    for line in lines:
        start = line.number("start_seconds")
        if seen and start <= seen[-1][0]:
            raise line.error("start_seconds", f"after {seen[-1][0]:g}, that of the line before")
        variation = line.number("rate_weighted_cv", 0) if line.fields.get("rate_weighted_cv") else None
        seen.append((start, line.number("requests_per_second", 0), variation))
    if not seen:
        raise TraceFileError(f"{called} holds no window")
    starts = [row[0] for row in seen]
    last = starts[-1] - starts[-2] if len(starts) > 1 else math.inf
    return tuple(
        RateWindow(start - starts[0], end - starts[0], rate, variation)
        for (start, rate, variation), end in zip(seen, [*starts[1:], starts[-1] + last], strict=True)
    )
