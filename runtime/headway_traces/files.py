"""Trace files; which format a file has, its first line tells.

    {"at_seconds": ..., "prompt_tokens": ..., "output_tokens": ...}   our own, JSON lines; docs/simulate.md
    TIMESTAMP,ContextTokens,GeneratedTokens             Azure LLM inference 2023 and 2024, CSV: a request each
    {"timestamp": ms, "input_length": ..., ...}         Mooncake, JSON lines; `hash_ids` are 512-token blocks
    {"chat_id": ..., "timestamp": s, ...}               Qwen-Bailian, the same with seconds and 16 tokens
    start_seconds,requests_per_second,...               rates by window, CSV; `rate_weighted_cv` may follow

Times become relative to the first row. Every row is checked; an error names line, field and value.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path

from headway_traces.line import Line, TraceFileError
from headway_traces.rows import csv_columns, csv_lines, json_line, json_lines
from headway_traces.text import text_lines

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
PUBLISHED_FIELDS = ("timestamp", "input_length", "output_length")
# What only Qwen-Bailian's rows have. Their other fields are not read: a later turn comes when it was recorded
# to come, and what it shares with the one before is in its hash ids.
BAILIAN_FIELD = "chat_id"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RATE_COLUMNS = ("start_seconds", "requests_per_second")
OWN_FIELDS = ("at_seconds", "prompt_tokens", "output_tokens")
ALL_OWN_FIELDS = {*OWN_FIELDS, "hash_ids", "hash_block_tokens"}
# A time without a zone is only ever compared with others of the same file.
EPOCH, UNZONED_EPOCH = datetime(1970, 1, 1, tzinfo=UTC), datetime(1970, 1, 1)  # noqa: DTZ001

# A TraceRequest's fields in their order, but for the time, which is the file's own. Many are held at once.
RecordedRow = tuple[float, int, int, tuple[int, ...], int]
RowReader = Callable[[Line], RecordedRow]


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


def read_trace_file(path: Path, called: str, most_requests: int | None = None) -> TraceFile:
    """What is in `path`, which errors call `called`.

    Raises TraceFileError, also as soon as there are more than `most_requests` of them, whatever follows.
    """
    with closing(text_lines(path, called)) as lines:
        numbered = enumerate(lines, start=1)
        number, first = next(((number, line) for number, line in numbered if line.strip()), (1, ""))
        if not first:
            raise TraceFileError(f"{called} is empty; give a file with a line for each request")
        if first.lstrip().startswith("{"):
            name, read = _json_format(called, number, first)
            rows = map(read, json_lines(called, chain([(number, first)], numbered)))
            return _requests(name, called, rows, most_requests)
        columns = csv_columns(first)
        rest = csv_lines(called, columns, number, lines)
        if set(columns) >= set(AZURE_COLUMNS):
            return _requests("azure", called, _azure_rows(rest), most_requests)
        if set(columns) >= set(RATE_COLUMNS):
            return TraceFile("rates", windows=_windows(called, rest))
    raise _unknown(called, first)


def _unknown(called: str, first: str) -> TraceFileError:
    return TraceFileError(
        f"{called} begins with {first[:80]!r}, which no known format does; give an Azure CSV, Mooncake's or "
        f"Qwen-Bailian's JSON lines, JSON lines with {', '.join(OWN_FIELDS)}, or a CSV of "
        f"{','.join(RATE_COLUMNS)}"
    )


def _json_format(called: str, number: int, first: str) -> tuple[str, RowReader]:
    """By the fields of the first row; one that lacks a field is still taken for what its others tell."""
    fields = json_line(called, number, first).fields.keys()
    if fields & set(OWN_FIELDS):
        return "headway", _own_row
    if not fields & set(PUBLISHED_FIELDS):
        raise _unknown(called, first)
    if BAILIAN_FIELD in fields:
        return "bailian", partial(_published_row, units_per_second=1, block_tokens=BAILIAN_BLOCK_TOKENS)
    return "mooncake", partial(_published_row, units_per_second=1000, block_tokens=MOONCAKE_BLOCK_TOKENS)


def _requests(
    format_name: str, called: str, rows: Iterator[RecordedRow], most_requests: int | None
) -> TraceFile:
    recorded = list(islice(rows, None if most_requests is None else most_requests + 1))
    if not recorded:
        raise TraceFileError(f"{called} holds no request")
    if most_requests is not None and len(recorded) > most_requests:
        raise TraceFileError(
            f"{called} holds more than {most_requests:,} requests; give some of its lines, in another file"
        )
    recorded.sort(key=itemgetter(0))
    first = recorded[0][0]
    recorded.reverse()
    return TraceFile(format_name, tuple(TraceRequest(row[0] - first, *row[1:]) for row in _drained(recorded)))


def _drained(rows: list[RecordedRow]) -> Iterator[RecordedRow]:
    """From the end; what is taken is held no longer."""
    while rows:
        yield rows.pop()


def _azure_rows(lines: Iterator[Line]) -> Iterator[RecordedRow]:
    """Zoned times are instants, whatever their offsets; beside those an unzoned one says nothing."""
    is_zoned: bool | None = None
    for line in lines:
        at = _azure_time(line)
        if is_zoned is None:
            is_zoned = at.tzinfo is not None
        elif is_zoned != (at.tzinfo is not None):
            known = "with" if is_zoned else "without"
            raise line.error("TIMESTAMP", f"a time {known} a zone, as those of the lines before are")
        yield (
            (at - (EPOCH if is_zoned else UNZONED_EPOCH)).total_seconds(),
            line.recorded_tokens("ContextTokens"),
            line.recorded_tokens("GeneratedTokens"),
            (),
            MOONCAKE_BLOCK_TOKENS,
        )


def _azure_time(line: Line) -> datetime:
    try:
        return datetime.fromisoformat(str(line.value("TIMESTAMP")).strip())
    except ValueError as error:
        raise line.error("TIMESTAMP", "a time as 2023-11-16 18:15:46.68") from error


def _published_row(line: Line, *, units_per_second: int, block_tokens: int) -> RecordedRow:
    lengths = line.recorded_tokens("input_length"), line.recorded_tokens("output_length")
    at = line.number("timestamp") / units_per_second
    return at, *lengths, line.hash_ids(), block_tokens


def _own_row(line: Line) -> RecordedRow:
    line.has_only(ALL_OWN_FIELDS)
    return (
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
