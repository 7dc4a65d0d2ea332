"""Reads the published trace formats; knows neither clocks nor prompts.

    TIMESTAMP,ContextTokens,GeneratedTokens            Azure LLM inference 2023 and 2024, CSV: a request each
    {"timestamp": ms, "input_length": ...              Mooncake, JSON lines; `hash_ids` are 512-token blocks
    {"chat_id": ..., "timestamp": s, "input_length": ...   Qwen-Bailian, the same with seconds and 16 tokens
    start_seconds,requests_per_second,...              rates by window, CSV; `rate_weighted_cv` may follow

Times are made relative to the first row. `replay` cuts a slice out of a trace, speeds it up and thins it.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy

from headway_bench.arrivals import RateSegment
from headway_bench.errors import InputFileError, OptionsError

MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
MOST_TOKENS = 1 << 24
# What only Qwen-Bailian's rows have. Their other fields are not read: a later turn comes when it was recorded
# to come, and what it shares with the one before is in its hash ids.
BAILIAN_FIELD = "chat_id"
_AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
_RATE_COLUMNS = {"start_seconds", "requests_per_second"}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as it was recorded. Equal hash ids at the front mean equal prompts there."""

    at_seconds: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RateWindow:
    """How fast requests came in a stretch of time; `coefficient_of_variation` of the gaps, where recorded."""

    start_seconds: float
    end_seconds: float
    requests_per_second: float
    coefficient_of_variation: float | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A file's rows by time: either requests or windows, the other is empty. block_tokens: of a hash id."""

    format_name: str
    requests: tuple[TraceRequest, ...] = ()
    windows: tuple[RateWindow, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Replay:
    """What part of a trace is replayed, and how.

    `speed` 2 replays in half the time; `rate_scale` keeps that share of the requests, chosen at random (of
    rates and their bursts, what such a choice would leave of them), or multiplies rates; `length_scale`
    multiplies lengths. The slice is in the trace's own seconds.
    """

    start_seconds: float = 0.0
    duration_seconds: float = math.inf
    speed: float = 1.0
    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_input_tokens: int | None = None


def read_trace(path: Path) -> Trace:
    """The trace in `path`, its format told by its first line. Raises InputFileError naming the line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.readlines()
            first = next((line for line in lines if line.strip()), "")
            if first.lstrip().startswith("{"):
                if f'"{BAILIAN_FIELD}"' in first:
                    found = _requests("bailian", path, _json_rows(path, lines, units_per_second=1))
                    return replace(found, block_tokens=BAILIAN_BLOCK_TOKENS)
                return _requests("mooncake", path, _json_rows(path, lines, units_per_second=1000))
            columns = {column.strip() for column in first.split(",")}
            if columns >= _AZURE_COLUMNS:
                return _requests("azure", path, _azure_rows(_csv_rows(path, lines)))
            if columns >= _RATE_COLUMNS:
                return Trace("rates", windows=_windows(path, _csv_rows(path, lines)))
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(f"--trace {str(path)!r} cannot be read: {error}") from error
    raise InputFileError(
        f"--trace {str(path)!r} begins with {first[:80]!r}, which no known format does; "
        "give an Azure CSV, Mooncake's or Qwen-Bailian's JSON lines, or a CSV of "
        "start_seconds,requests_per_second"
    )


def replay_requests(trace: Trace, replay: Replay, random: numpy.random.Generator) -> tuple[TraceRequest, ...]:
    """The slice's requests, times counted from the slice's start in seconds of the replay."""
    if replay.rate_scale > 1:
        raise OptionsError(
            f"--trace-rate-scale={replay.rate_scale:g} asks for more requests than the trace has; "
            "use --trace-speed to send them faster"
        )
    end = replay.start_seconds + replay.duration_seconds
    inside = [r for r in trace.requests if replay.start_seconds <= r.at_seconds < end]
    if replay.rate_scale < 1:
        kept = random.random(len(inside)) < replay.rate_scale
        inside = [request for request, keep in zip(inside, kept, strict=True) if keep]
    scaled = [_scaled(request, replay) for request in inside]
    if replay.max_input_tokens is not None:
        scaled = [request for request in scaled if request.input_tokens <= replay.max_input_tokens]
    if not scaled:
        raise OptionsError("the slice of the trace holds no request; widen it or raise --max-input-length")
    return tuple(scaled)


def replay_rates(trace: Trace, replay: Replay, burstiness: float | None) -> tuple[RateSegment, ...]:
    """The slice's windows as rates of arrival; `burstiness` overrides what was recorded."""
    end = replay.start_seconds + replay.duration_seconds
    segments = []
    for window in trace.windows:
        start, stop = max(window.start_seconds, replay.start_seconds), min(window.end_seconds, end)
        if start >= stop:
            continue
        rate = window.requests_per_second * replay.rate_scale * replay.speed
        recorded = _thinned(window.coefficient_of_variation, min(1.0, replay.rate_scale))
        shape = burstiness if burstiness is not None or not recorded else recorded**-2
        segments.append(
            RateSegment(
                (start - replay.start_seconds) / replay.speed,
                (stop - replay.start_seconds) / replay.speed,
                rate,
                rate,
                shape,
            )
        )
    if not any(segment.rate_at_start > 0 for segment in segments):
        raise OptionsError("the slice of the trace holds no window with requests; widen it")
    return tuple(segments)


def _thinned(variation: float | None, share: float) -> float | None:
    """The gaps' variation where that share of the requests is kept: bursts are taken apart.

    Of a renewal process whose gaps have the squared variation v, the thinned one's is 1 + share * (v - 1).
    """
    return None if not variation else math.sqrt(1 + share * (variation**2 - 1))


def _scaled(request: TraceRequest, replay: Replay) -> TraceRequest:
    return replace(
        request,
        at_seconds=(request.at_seconds - replay.start_seconds) / replay.speed,
        input_tokens=max(1, round(request.input_tokens * replay.length_scale)),
        output_tokens=max(1, round(request.output_tokens * replay.length_scale)),
    )


def _requests(format_name: str, path: Path, rows: Iterable[TraceRequest]) -> Trace:
    ordered = sorted(rows, key=lambda request: request.at_seconds)
    if not ordered:
        raise InputFileError(f"--trace {str(path)!r} holds no request")
    first = ordered[0].at_seconds
    return Trace(format_name, tuple(replace(r, at_seconds=r.at_seconds - first) for r in ordered))


def _csv_rows(path: Path, lines: Sequence[str]) -> "Iterator[_Line]":
    """Columns are known by their names without blanks around them."""
    blank = next(index for index, line in enumerate(lines) if line.strip())
    reader = csv.DictReader(lines[blank:])
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        for row in reader:
            yield _Line(path, blank + reader.line_num, row)
    except csv.Error as error:
        raise InputFileError(
            f"--trace {str(path)!r}, line {blank + reader.line_num + 1} is no CSV: {error}"
        ) from error


def _azure_rows(lines: "Iterator[_Line]") -> Iterator[TraceRequest]:
    for line in lines:
        try:
            at = datetime.fromisoformat(str(line.value("TIMESTAMP")).strip())
        except ValueError as error:
            raise line.error("TIMESTAMP", "a time as 2023-11-16 18:15:46.68") from error
        lengths = line.tokens("ContextTokens"), line.tokens("GeneratedTokens")
        # An unzoned time is only ever compared with others of the same file.
        yield TraceRequest((at.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds(), *lengths)  # noqa: DTZ001


def _json_rows(path: Path, lines: Iterable[str], *, units_per_second: int) -> Iterator[TraceRequest]:
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"--trace {str(path)!r}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputFileError(f"--trace {str(path)!r}, line {number} is no JSON object; write one a line")
        line = _Line(path, number, row, is_json=True)
        lengths = line.tokens("input_length"), line.tokens("output_length")
        yield TraceRequest(line.number("timestamp") / units_per_second, *lengths, line.hash_ids())


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a trace by its fields. What cannot be is an InputFileError that names all of it. is_json:
    numbers are numbers and no text."""

    path: Path
    number_in_file: int
    fields: Mapping[str, Any]
    is_json: bool = False

    def value(self, field: str) -> Any:
        if self.fields.get(field) is None:
            raise InputFileError(
                f"--trace {str(self.path)!r}, line {self.number_in_file}: {field} is missing; write it, or "
                "leave the line out"
            )
        return self.fields[field]

    def error(self, field: str, wanted: str) -> InputFileError:
        return InputFileError(
            f"--trace {str(self.path)!r}, line {self.number_in_file}: {field}="
            f"{self.fields[field]!r:.80} is not {wanted}; correct it, or leave the line out"
        )

    def number(self, field: str, lowest: float = -math.inf) -> float:
        wanted = "a finite number" if math.isinf(lowest) else f"a finite number from {lowest:g} on"
        found = self.value(field)
        if isinstance(found, bool) or (self.is_json and not isinstance(found, int | float)):
            raise self.error(field, wanted)
        try:
            value = float(found)
        except (ValueError, TypeError, OverflowError) as error:
            raise self.error(field, wanted) from error
        if not math.isfinite(value) or value < lowest:
            raise self.error(field, wanted)
        return value

    def tokens(self, field: str) -> int:
        """Published traces hold a few requests of no tokens; a server takes none such."""
        value = self.number(field, 0)
        if value != int(value) or value > MOST_TOKENS:
            raise self.error(field, f"a whole number up to {MOST_TOKENS}")
        return max(1, int(value))

    def hash_ids(self) -> tuple[int, ...]:
        found = self.fields.get("hash_ids", [])
        if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
            raise self.error("hash_ids", "a list of integers from 0 on")
        return tuple(found)


def _windows(path: Path, lines: Iterator[_Line]) -> tuple[RateWindow, ...]:
    seen: list[tuple[float, float, float | None]] = []
    for line in lines:
        variation = line.number("rate_weighted_cv", 0) if line.fields.get("rate_weighted_cv") else None
        seen.append((line.number("start_seconds"), line.number("requests_per_second", 0), variation))
        if len(seen) > 1 and seen[-1][0] <= seen[-2][0]:
            raise line.error("start_seconds", f"after {seen[-2][0]:g}, that of the line before")
    if not seen:
        raise InputFileError(f"--trace {str(path)!r} holds no window")
    return tuple(_closed(seen))


def _closed(seen: Sequence[tuple[float, float, float | None]]) -> Iterator[RateWindow]:
    """A window lasts until the next begins; the last one as long as the one before it."""
    starts = [row[0] for row in seen]
    last = starts[-1] - starts[-2] if len(starts) > 1 else math.inf
    for row, end in zip(seen, [*starts[1:], starts[-1] + last], strict=True):
        yield RateWindow(row[0] - starts[0], end - starts[0], row[1], row[2])
