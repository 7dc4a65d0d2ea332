"""Reads trace files; which format a file has, its first line tells.

    {"at_seconds": ..., "prompt_tokens": ..., "output_tokens": ...}   our own, JSON lines; docs/simulate.md
    TIMESTAMP,ContextTokens,GeneratedTokens                           Azure LLM inference, CSV
    {"timestamp": ms, "input_length": ..., "output_length": ...}      Mooncake, JSON lines
    {"chat_id": ..., "timestamp": s, "input_length": ..., ...}        Qwen-Bailian, JSON lines
    start_seconds,requests_per_second,...                             rates, as ServeGen's, CSV

Times become relative to the first row. Every row is checked; an error names file, line and field.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from headway_simulator.errors import TraceError
from headway_simulator.rates import RateWindow
from headway_simulator.trace import Arrival, Trace, by_time

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
MOST_TOKENS = 1 << 24
MOST_DIGITS = len(str(MOST_TOKENS))
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
RATE_COLUMNS = ("start_seconds", "requests_per_second")
OWN_FIELDS = ("at_seconds", "prompt_tokens", "output_tokens")
OWN_OPTIONAL_FIELDS = ("hash_ids", "hash_block_tokens")
PUBLISHED_FIELDS = ("timestamp", "input_length", "output_length")
# What only Qwen-Bailian's rows have. Their other fields are not read: a later turn comes when it was recorded
# to come, and what it shares with the one before is in its hash ids.
BAILIAN_FIELD = "chat_id"
RowReader = Callable[[str, Mapping[str, Any]], Arrival]
Rows = Iterator[tuple[int, dict[str, Any]]]


def read_trace(path: Path) -> Trace | tuple[RateWindow, ...]:
    """The requests in `path`, or its rates where it holds rates. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        return _trace(path, _json_rows(path, lines, _row_reader(first)))
    columns = [column.strip() for column in first.split(",")]
    if set(columns) >= set(AZURE_COLUMNS):
        return _trace(path, _azure_rows(path, _csv_rows(path, lines)))
    if set(columns) >= set(RATE_COLUMNS):
        return _windows(path, _csv_rows(path, lines))
    raise TraceError(
        f"{path}, line 1: {first[:80]!r} begins no known format; give JSON lines with "
        f"{', '.join(OWN_FIELDS)}, an Azure CSV, Mooncake's or Qwen-Bailian's JSON lines, or a CSV "
        f"of {','.join(RATE_COLUMNS)}"
    )


def _trace(path: Path, rows: Iterator[Arrival]) -> Trace:
    arrivals = by_time(rows)
    if not arrivals:
        raise TraceError(f"{path}: holds no request")
    first = arrivals[0].at_seconds
    last = arrivals[-1].at_seconds - first
    moved = tuple(replace(one, at_seconds=one.at_seconds - first) for one in arrivals)
    # The mean gap follows the last request, too.
    return Trace(path.name, moved, last + (last / (len(moved) - 1) if len(moved) > 1 and last else 1.0))


def _azure_rows(path: Path, rows: Rows) -> Iterator[Arrival]:
    for number, row in rows:
        where = f"{path}, line {number}"
        text = row["TIMESTAMP"] or ""
        try:
            # Times without a zone are only ever compared with others of the same file.
            at = datetime.fromisoformat(text.strip()[:26]).replace(tzinfo=None)
        except ValueError as error:
            raise TraceError(f"{where}, TIMESTAMP: {text!r} is no time; write 2023-11-16 18:15:46") from error
        yield Arrival(
            (at - datetime(1970, 1, 1)).total_seconds(),  # noqa: DTZ001
            _recorded_tokens(where, "ContextTokens", row["ContextTokens"]),
            _recorded_tokens(where, "GeneratedTokens", row["GeneratedTokens"]),
        )


def _row_reader(first: str) -> RowReader:
    if '"at_seconds"' in first:
        return _own_row
    if f'"{BAILIAN_FIELD}"' in first:
        return partial(_published_row, units_per_second=1, block_tokens=BAILIAN_BLOCK_TOKENS)
    return partial(_published_row, units_per_second=1000, block_tokens=MOONCAKE_BLOCK_TOKENS)


def _csv_rows(path: Path, lines: list[str]) -> Rows:
    """With their line's number, by their columns' names without blanks around them."""
    blank = next(index for index, line in enumerate(lines) if line.strip())
    reader = csv.DictReader(lines[blank:])
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        for row in reader:
            yield blank + reader.line_num, row
    except csv.Error as error:
        raise TraceError(f"{path}, line {blank + reader.line_num + 1}: is no CSV: {error}") from error


def _json_rows(path: Path, lines: list[str], read: RowReader) -> Iterator[Arrival]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{where}: {line[:80]!r} is no object; write one per line")
        yield read(where, row)


def _own_row(where: str, row: Mapping[str, Any]) -> Arrival:
    _require(where, row, OWN_FIELDS)
    unknown = sorted(row.keys() - {*OWN_FIELDS, *OWN_OPTIONAL_FIELDS})
    if unknown:
        raise TraceError(f"{where}, {unknown[0]}: unknown field; remove it")
    block_tokens = row.get("hash_block_tokens", MOONCAKE_BLOCK_TOKENS)
    return Arrival(
        _seconds(where, "at_seconds", row["at_seconds"]),
        _tokens(where, "prompt_tokens", row["prompt_tokens"]),
        _tokens(where, "output_tokens", row["output_tokens"]),
        _hash_ids(where, row.get("hash_ids", [])),
        _tokens(where, "hash_block_tokens", block_tokens),
    )


def _published_row(
    where: str, row: Mapping[str, Any], *, units_per_second: int, block_tokens: int
) -> Arrival:
    _require(where, row, PUBLISHED_FIELDS)
    return Arrival(
        _seconds(where, "timestamp", row["timestamp"]) / units_per_second,
        _recorded_tokens(where, "input_length", row["input_length"]),
        _recorded_tokens(where, "output_length", row["output_length"]),
        _hash_ids(where, row.get("hash_ids", [])),
        block_tokens,
    )


def _windows(path: Path, rows: Rows) -> tuple[RateWindow, ...]:
    seen: list[tuple[float, float, float | None]] = []
    for number, row in rows:
        where = f"{path}, line {number}"
        start = _seconds(where, "start_seconds", row["start_seconds"])
        rate = _seconds(where, "requests_per_second", row["requests_per_second"])
        variation = row.get("rate_weighted_cv") or None
        if seen and start <= seen[-1][0]:
            raise TraceError(f"{where}, start_seconds: {start:g} does not come after {seen[-1][0]:g}")
        seen.append(
            (start, rate, None if variation is None else _seconds(where, "rate_weighted_cv", variation))
        )
    if len(seen) < 2:
        raise TraceError(f"{path}: holds {len(seen)} rows; two at least say how long a window lasts")
    starts = [row[0] for row in seen]
    ends = [*starts[1:], 2 * starts[-1] - starts[-2]]
    return tuple(
        RateWindow(start - starts[0], end - starts[0], rate, variation)
        for (start, rate, variation), end in zip(seen, ends, strict=True)
    )


def _require(where: str, row: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    for field in fields:
        if field not in row:
            raise TraceError(f"{where}, {field}: is missing; write it")


def _seconds(where: str, field: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf or isinstance(value, bool):
        raise TraceError(f"{where}, {field}: {value!r} is no number from 0; write one")
    return number


def _tokens(where: str, field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        raise TraceError(f"{where}, {field}: {value!r} is no number of tokens; write 1 to {MOST_TOKENS}")
    return value


def _recorded_tokens(where: str, field: str, value: object) -> int:
    """Of a published trace: text in a CSV, and now and then 0, which no server takes; that counts as 1."""
    text = str(value).strip()
    if not text.isdecimal() or isinstance(value, bool) or len(text) > MOST_DIGITS:
        raise TraceError(f"{where}, {field}: {value!r:.80} is no number of tokens; write 0 to {MOST_TOKENS}")
    return _tokens(where, field, max(1, int(text)))


def _hash_ids(where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
    ):
        raise TraceError(f"{where}, hash_ids: {str(value)[:80]!r} is no list of integers from 0; write one")
    return tuple(value)
