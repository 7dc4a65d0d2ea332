"""Traces: every format read, every bad line named, halves and scaled traces as asked."""

import gzip
from pathlib import Path

import pytest

from headway_simulator.errors import TraceError
from headway_simulator.generators import Course, generated
from headway_simulator.rates import Lengths, RateWindow
from headway_simulator.trace import Arrival, Trace, half_of, part_of, percentile_of, scaled_rate
from headway_simulator.trace_files import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PACKED = gzip.compress((AZURE + "2023-11-16 18:15:46.68,374,44\n").encode())
LENGTHS = Lengths(None)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_rows_become_requests_in_order_of_time(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:46.6805900,374,0\r\n"
    trace = read_trace(written(tmp_path, text))
    assert isinstance(trace, Trace)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.arrivals] == [(374, 1), (396, 109)]
    assert trace.arrivals[0].at_seconds == 0.0
    assert trace.arrivals[1].at_seconds == pytest.approx(4.314579)
    assert trace.duration_seconds == pytest.approx(2 * 4.314579)


@pytest.mark.parametrize(
    "later",
    ["2024-10-27T02:00:10+01:00", "2024-10-27T01:00:10Z", "2024-10-27 01:00:10.000000+00:00"],
    ids=["another offset", "Z", "as Azure's of 2024"],
)
def test_times_with_a_zone_are_compared_as_instants(tmp_path: Path, later: str) -> None:
    """The hour that the clocks show twice, when summer time ends."""
    trace = read_trace(written(tmp_path, AZURE + f"2024-10-27T02:59:50+02:00,5,5\n{later},6,6\n"))
    assert isinstance(trace, Trace)
    assert [(one.at_seconds, one.prompt_tokens) for one in trace.arrivals] == [(0.0, 5), (20.0, 6)]


def test_mooncake_rows_keep_their_hash_ids(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n\n'
        '{"timestamp": 3500, "input_length": 100, "output_length": 6, "hash_ids": [0]}\n'
    )
    trace = read_trace(written(tmp_path, text))
    assert isinstance(trace, Trace)
    assert trace.arrivals[0] == Arrival(0.0, 600, 5, (0, 7), 512)
    assert trace.arrivals[1] == Arrival(2.5, 100, 6, (0,), 512)


def test_bailian_rows_are_in_seconds_and_in_blocks_of_16(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl"
    path.write_text(
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, '
        '"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 71.614, "input_length": 700, '
        '"output_length": 10, "type": "text", "turn": 2, "hash_ids": [1089, 1091]}\n'
    )
    trace = read_trace(path)
    assert isinstance(trace, Trace)
    assert [one.at_seconds for one in trace.arrivals] == pytest.approx([0, 10.5])
    assert [one.hash_ids for one in trace.arrivals] == [(1089, 1090), (1089, 1091)]
    assert {one.hash_block_tokens for one in trace.arrivals} == {16}


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP, ContextTokens ,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
        '"TIMESTAMP","ContextTokens","GeneratedTokens"\r\n"2023-11-16 18:15:46.68","374","44"\r\n',
        '"TIMESTAMP", "ContextTokens" , "GeneratedTokens"\n"2023-11-16 18:15:46.68", "374", "44"\n',
        AZURE + "\n   \n2023-11-16 18:15:46.68,374,44\n\t\n \r\n",
        AZURE + "\t \n2023-11-16 18:15:46.68,374,44\n",
    ],
    ids=["around columns", "quotes", "before quotes", "blank lines", "a blank line of tabs"],
)
def test_quotes_and_blanks_of_a_csv_are_passed_over(tmp_path: Path, text: str) -> None:
    trace = read_trace(written(tmp_path, text))
    assert isinstance(trace, Trace)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.arrivals] == [(374, 44)]


def test_rows_of_our_own_format_may_say_how_long_their_blocks_are(tmp_path: Path) -> None:
    text = (
        '{"at_seconds": 0, "prompt_tokens": 40, "output_tokens": 2, "hash_ids": [3], "hash_block_tokens": 64}'
    )
    trace = read_trace(written(tmp_path, text))
    assert isinstance(trace, Trace)
    assert trace.arrivals == (Arrival(0.0, 40, 2, (3,), 64),)
    assert trace.duration_seconds > 0


@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": 5, "input_length": 40, "output_length": 2, "hash_ids": null}',
        '{"chat_id": 1, "timestamp": 5, "input_length": 40, "output_length": 2, "hash_ids": null}',
        '{"at_seconds": 5, "prompt_tokens": 40, "output_tokens": 2, "hash_ids": null}',
    ],
    ids=["Mooncake", "Qwen-Bailian", "our own"],
)
def test_hash_ids_of_null_are_not_known(tmp_path: Path, text: str) -> None:
    trace = read_trace(written(tmp_path, text))
    assert isinstance(trace, Trace)
    assert [(one.prompt_tokens, one.hash_ids) for one in trace.arrivals] == [(40, ())]


def test_blocks_of_null_tokens_are_as_long_as_those_of_no_stated_length(tmp_path: Path) -> None:
    row = '{"at_seconds": 0, "prompt_tokens": 9, "output_tokens": 1, "hash_ids": [3], "hash_block_tokens": '
    text = row + "null}"
    trace = read_trace(written(tmp_path, text))
    assert isinstance(trace, Trace)
    assert trace.arrivals == (Arrival(0.0, 9, 1, (3,), 512),)


def test_rates_become_windows_of_which_the_last_is_as_long_as_the_one_before(tmp_path: Path) -> None:
    text = "start_seconds,requests_per_second,rate_weighted_cv,active_clients\n0,2,1.5,4\n600,4,,3\n"
    assert read_trace(written(tmp_path, text)) == (
        RateWindow(0.0, 600.0, 2.0, 1.5),
        RateWindow(600.0, 1200.0, 4.0, None),
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "is empty; give a file with a line for each request"),
        (" \n\n", "is empty; give a file with a line for each request"),
        ("a,b\n1,2\n", "begins with 'a,b\\n', which no known format does"),
        (AZURE, "holds no request"),
        (AZURE + "yesterday,1,2\n", "line 2: TIMESTAMP='yesterday' is not a time"),
        (
            AZURE + "2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,x,2\n",
            "line 3: ContextTokens='x' is not a finite number",
        ),
        (
            AZURE + "2023-11-16 18:15:46Z,1,2\n2023-11-16 18:15:47,1,2\n",
            "line 3: TIMESTAMP='2023-11-16 18:15:47' is not a time with a zone, as those of the lines",
        ),
        (
            AZURE + "2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47+01:00,1,2\n",
            "line 3: TIMESTAMP='2023-11-16 18:15:47+01:00' is not a time without a zone, as those of",
        ),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 2: GeneratedTokens is missing"),
        (AZURE + "2023-11-16 18:15:46,1,2,3,4\n", "line 2 has ['3', '4'] beyond the 3 columns of the first"),
        (
            '{"prompt": "x"}\n',
            """begins with '{"prompt": "x"}\\n', which no known format does; give an Azure""",
        ),
        ('{"chat_id": 1, "prompt": "timestamp"}\n', "which no known format does; give an Azure CSV"),
        ("{}", "begins with '{}', which no known format does"),
        ("\n{\n", "line 2 is no JSON"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "line 1: at_seconds is missing"),
        ('{"chat_id": 1, "timestamp": 0}', "line 1: input_length is missing"),
        ('{"at_seconds": 0}\n', "line 1: prompt_tokens is missing"),
        (
            '{"at_seconds": 0, "prompt_tokens": 0, "output_tokens": 1}',
            "line 1: prompt_tokens=0 is not a finite number from 1 on",
        ),
        (
            '{"at_seconds": -1, "prompt_tokens": 1, "output_tokens": 1}',
            "line 1: at_seconds=-1 is not a finite number from 0 on",
        ),
        (
            '{"at_seconds": NaN, "prompt_tokens": 1, "output_tokens": 1}',
            "line 1: at_seconds=nan is not",
        ),
        ('{"at_seconds": 0, "prompt_tokens": true, "output_tokens": 1}', "prompt_tokens=True is not"),
        (
            '{"at_seconds": 0, "prompt_tokens": 1, "output_tokens": 1, "x": 1}',
            "line 1: x is no field of this format; remove it",
        ),
        (
            '{"at_seconds": 0, "prompt_tokens": 1, "output_tokens": 1, "hash_ids": [-1]}',
            "line 1: hash_ids=[-1] is not",
        ),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1: output_length is missing"),
        (
            '{"timestamp": 1' + 400 * "0" + ', "input_length": 5, "output_length": 5}',
            "line 1: timestamp=1000",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timesta', "line 2 is no JSON"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 5}\n[1]\n',
            "line 2 is no JSON object: [1]; write one a line",
        ),
        ("start_seconds,requests_per_second\n0,1\n0,2\n", "line 3: start_seconds='0' is not after 0"),
        (
            "start_seconds,requests_per_second\n0,1\n600,-2\n",
            "line 3: requests_per_second='-2' is not a finite number from 0",
        ),
        ("start_seconds,requests_per_second\n0,1\n", "holds one window"),
        (
            "start_seconds,requests_per_second,rate_weighted_cv\n0,1,1\n60,1,1e-200\n",
            "window 60 s after the first: rate_weighted_cv=1e-200 is not from 0.01 to 100",
        ),
        (
            "start_seconds,requests_per_second,rate_weighted_cv\n0,1,1\n60,1,0\n",
            "rate_weighted_cv=0.0 is not from 0.01 to 100; correct it, or leave it empty",
        ),
        # Blank lines count, too.
        ("\n\n" + AZURE + "yesterday,1,2\n", "line 4: TIMESTAMP='yesterday' is not a time"),
        (AZURE + "\n\nyesterday,1,2\n", "line 4: TIMESTAMP='yesterday' is not a time"),
        (AZURE + "   \nyesterday,1,2\n", "line 3: TIMESTAMP='yesterday' is not a time"),
        (AZURE + ",,\n", "line 2: TIMESTAMP=''"),
        (AZURE + f"2023-11-16 18:15:46,{'9' * 5000},2\n", "line 2: ContextTokens='99999"),
        (AZURE + f"2023-11-16 18:15:46,{'9' * 140_000},2\n", "line 2 is no CSV: field larger than"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ' + 99_999 * "[" + "\n",
            "line 1 is no JSON",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, text: str, want: str) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(written(tmp_path, text))
    assert want in str(error.value)
    assert str(tmp_path / "trace") in str(error.value)


def test_of_too_many_requests_no_more_is_read_than_tells_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_simulator.trace_files.MOST_REQUESTS", 2)
    rows = [f"2023-11-16 18:15:4{second},1,2\n" for second in range(3)]
    trace = read_trace(written(tmp_path, AZURE + "".join(rows[:2])))
    assert isinstance(trace, Trace)
    assert len(trace.arrivals) == 2
    with pytest.raises(TraceError, match="holds more than 2 requests; give some of its lines"):
        read_trace(written(tmp_path, AZURE + "".join(rows) + "and a line that is none\n"))


def test_a_file_that_gzip_packed_is_read_as_the_one_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,109\n")
    plain = read_trace(path)
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed)
    assert read_trace(path) == plain


@pytest.mark.parametrize(
    ("held", "want"),
    [
        (
            PACKED[:-12],
            "is packed by gzip, and broken: Compressed file ended before .*; give it whole, or unpacked",
        ),
        (PACKED + b"what else", "is packed by gzip, and broken: Not a gzipped file"),
        (PACKED[:12] + b"\xff" + PACKED[13:], "is packed by gzip, and broken: "),
        (b"\x28\xb5\x2f\xfd\x04\x00", "is no UTF-8 text: it has byte 0xb5; unpack it, if anything but gzip"),
        (AZURE.encode("utf-16"), "is no UTF-8 text: it has byte 0xff; .* or write it as UTF-8"),
    ],
    ids=["cut off", "with an end of its own", "changed", "packed by zstd", "UTF-16"],
)
def test_a_file_of_bytes_that_are_no_text_is_named(tmp_path: Path, held: bytes, want: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(held)
    with pytest.raises(TraceError, match=want) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(TraceError) as error:
        read_trace(missing)
    want = f"{missing} cannot be read: No such file or directory; check the path, and who may read it"
    assert str(error.value) == want
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path)
    assert str(error.value) == f"{tmp_path} cannot be read: it is a folder; give a file"


def test_the_halves_share_the_time_and_lose_no_request() -> None:
    trace = generated(Course("step", 3.0, 300.0), LENGTHS, 1)
    tuning, verdict = half_of(trace, "tuning"), half_of(trace, "verdict")
    assert len(tuning.arrivals) + len(verdict.arrivals) == len(trace.arrivals)
    assert tuning.duration_seconds == verdict.duration_seconds == 150.0
    assert verdict.arrivals[0].at_seconds >= 0.0
    # The jump is after a third of the whole.
    assert tuning.step_at_seconds == 100.0
    assert verdict.step_at_seconds is None
    assert half_of(trace, "all") == trace


def test_a_part_counts_time_from_its_own_start() -> None:
    trace = Trace("t", tuple(Arrival(float(i), 1, 1) for i in range(10)), 10.0)
    part = part_of(trace, 3.0, 5.0)
    assert [one.at_seconds for one in part.arrivals] == [0.0, 1.0]
    assert part.duration_seconds == 2.0


@pytest.mark.parametrize("factor", [0.25, 0.8, 2.0, 3.5])
def test_a_scaled_trace_has_so_many_times_the_requests(factor: float) -> None:
    trace = generated(Course("diurnal", 5.0, 1200.0, period_seconds=1200.0), LENGTHS, 2)
    scaled = scaled_rate(trace, factor, seed=3)
    num = len(trace.arrivals)
    assert len(scaled.arrivals) == pytest.approx(factor * num, rel=0.05)
    times = [one.at_seconds for one in scaled.arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < trace.duration_seconds
    # The course of the rate stays: the middle of the period is its noon.
    noon = sum(400 <= at < 800 for at in times) / len(times)
    assert noon == pytest.approx(sum(400 <= one.at_seconds < 800 for one in trace.arrivals) / num, abs=0.04)
    assert scaled == scaled_rate(trace, factor, seed=3)
    assert scaled != scaled_rate(trace, factor, seed=4)


def test_copies_are_other_users() -> None:
    trace = Trace("t", (Arrival(5.0, 600, 1, (1, 2)),), 100.0)
    assert {one.user_space for one in scaled_rate(trace, 3.0, 0).arrivals} == {0, 1, 2}


def test_a_percentile_is_a_value_that_was_there() -> None:
    assert percentile_of([5, 1, 4, 2, 3], 50) == 3
    assert percentile_of([1, 2], 99) == 2
    assert percentile_of([7], 1) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile_of([], 50)
