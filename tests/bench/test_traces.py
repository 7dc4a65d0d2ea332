"""Reading and cutting traces, on samples in the published shapes."""

import math
from pathlib import Path

import pytest

from headway_bench.errors import InputFileError, OptionsError
from headway_bench.traces import Replay, block_tokens, read_trace, replay_rates, replay_requests
from headway_bench.workload import random_stream

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:16:46.6805900,879,55"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 1100, "output_length": 1, "hash_ids": [0, 2, 3]}\n\n'
)
RATES = (
    "start_seconds,requests_per_second,rate_weighted_cv,active_clients\n"
    "0,212.78,2.0,43\n600,100,1.5,40\n1200,50,,40\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode())
    return path


def test_azure_times_are_counted_from_the_first_request(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.format_name == "azure"
    assert [r.at_seconds for r in trace.requests] == pytest.approx([0, 4.314579, 60], abs=1e-5)
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109), (879, 55)]


def test_mooncake_keeps_what_prompts_share(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert [r.at_seconds for r in trace.requests] == [0, 3]
    assert [r.hash_ids for r in trace.requests] == [(0, 1), (0, 2, 3)]


def test_bailian_is_in_seconds_and_in_blocks_of_16(tmp_path: Path) -> None:
    rows = (
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 30, "output_length": 2, '
        '"type": "text", "turn": 1, "hash_ids": [7, 8]}\n'
        '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 64.0, "input_length": 40, "output_length": 2, '
        '"type": "text", "turn": 2, "hash_ids": [7, 9, 10]}\n'
    )
    trace = read_trace(write(tmp_path, rows))
    assert (trace.format_name, block_tokens(trace.requests)) == ("bailian", 16)
    assert [r.at_seconds for r in trace.requests] == [0, 2.5]
    assert [r.hash_ids for r in trace.requests] == [(7, 8), (7, 9, 10)]
    assert block_tokens(read_trace(write(tmp_path, MOONCAKE)).requests) == 512


def test_rates_hold_until_the_next_window_and_the_last_as_long_as_the_one_before(tmp_path: Path) -> None:
    windows = read_trace(write(tmp_path, RATES)).windows
    assert [(w.start_seconds, w.end_seconds) for w in windows] == [(0, 600), (600, 1200), (1200, 1800)]
    assert [w.coefficient_of_variation for w in windows] == [2.0, 1.5, None]


def test_a_slice_is_cut_then_sped_up_and_scaled(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    replay = Replay(start_seconds=4, duration_seconds=60, speed=2, length_scale=0.5)
    requests = replay_requests(trace, replay, random_stream(0))
    assert [r.at_seconds for r in requests] == pytest.approx([0.1572895, 28], abs=1e-5)
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(198, 54), (440, 28)]


def test_thinning_keeps_a_random_share(tmp_path: Path) -> None:
    lines = [f'{{"timestamp": {n}, "input_length": 5, "output_length": 5}}' for n in range(4000)]
    trace = read_trace(write(tmp_path, "\n".join(lines)))
    kept = replay_requests(trace, Replay(rate_scale=0.25), random_stream(0))
    assert len(kept) == pytest.approx(1000, rel=0.1)
    assert kept == replay_requests(trace, Replay(rate_scale=0.25), random_stream(0))
    with pytest.raises(OptionsError, match="--trace-speed"):
        replay_requests(trace, Replay(rate_scale=1.5), random_stream(0))


def test_longer_prompts_can_be_left_out_but_not_all(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert len(replay_requests(trace, Replay(max_input_tokens=400), random_stream(0))) == 2
    with pytest.raises(OptionsError, match="holds no request"):
        replay_requests(trace, Replay(max_input_tokens=10), random_stream(0))


def test_rates_replayed_faster_bring_the_same_number_of_requests(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, RATES))
    replay = Replay(start_seconds=300, duration_seconds=600, speed=10, rate_scale=0.1)
    first, second = replay_rates(trace, replay, None)
    assert (first.start_seconds, first.end_seconds) == (0, 30)
    assert (second.start_seconds, second.end_seconds) == (30, 60)
    assert first.expected_arrivals == pytest.approx(0.1 * 300 * 212.78)
    assert second.expected_arrivals == pytest.approx(0.1 * 300 * 100)
    # Recorded: 2. A tenth of the requests, chosen at random, is less bursty than all of them.
    assert first.burstiness == pytest.approx(1 / (1 + 0.1 * (2**2 - 1)))
    assert replay_rates(trace, Replay(speed=10), None)[0].burstiness == pytest.approx(1 / 4)
    assert replay_rates(trace, replay, 3.0)[0].burstiness == 3.0


def test_a_window_without_a_recorded_variation_leaves_it_to_the_process(tmp_path: Path) -> None:
    segments = replay_rates(read_trace(write(tmp_path, RATES)), Replay(), None)
    assert segments[2].burstiness is None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (AZURE.replace("396", "many"), "line 3: ContextTokens='many' is not a finite number from 0 on"),
        (AZURE.replace("396", "nan"), "line 3: ContextTokens='nan'"),
        (AZURE.replace(",55", ",inf"), "line 4: GeneratedTokens='inf'"),
        (AZURE.replace("396", "39.5"), "line 3: ContextTokens='39.5' is not a whole number"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "soon"), "line 3: TIMESTAMP='soon' is not a time"),
        (AZURE.replace(",109", ""), "line 3: GeneratedTokens is missing; write it"),
        (MOONCAKE.replace('"input_length": 1100, ', ""), "line 2: input_length is missing"),
        (MOONCAKE.replace("1100", "1e400"), "line 2: input_length=inf is not a finite number from 0 on"),
        (MOONCAKE.replace("1100", "1" + 400 * "0"), "line 2: input_length=1000"),
        (MOONCAKE.replace("1100", "-1"), "line 2: input_length=-1"),
        (
            MOONCAKE.replace("3000", "NaN"),
            "line 2: timestamp=nan is not a finite number; correct it, or leave",
        ),
        (MOONCAKE.replace("3000", "-Infinity"), "line 2: timestamp=-inf"),
        (
            MOONCAKE.replace("[0, 2, 3]", "[0, 1e400]"),
            r"line 2: hash_ids=\[0, inf\] is not a list of integers",
        ),
        (
            MOONCAKE.replace("1100", "1e30"),
            r"line 2: input_length=1e\+30 is not a whole number up to 16777216",
        ),
        (MOONCAKE.replace("1100", "true"), "line 2: input_length=True is not a finite number"),
        (MOONCAKE.replace("1100", '"1100"'), "line 2: input_length='1100' is not a finite number"),
        (MOONCAKE.replace("3000", "true"), "line 2: timestamp=True"),
        (MOONCAKE.replace("[0, 2, 3]", '"12"'), "line 2: hash_ids='12' is not a list"),
        (MOONCAKE.replace("[0, 2, 3]", "[-1]"), r"line 2: hash_ids=\[-1\] is not a list"),
        (MOONCAKE.replace("[0, 2, 3]", "[1.7]"), r"line 2: hash_ids=\[1.7\] is not a list"),
        (MOONCAKE.replace("[0, 2, 3]", 99_999 * "["), "line 2 is no JSON"),
        ("\n" + AZURE.replace("396", "many"), "line 4: ContextTokens='many'"),
        (AZURE.replace("396", "9" * 140_000), "line 3 is no CSV: field larger than"),
        (MOONCAKE + "[1]", "line 4 is no JSON object"),
        ('{"timestamp": 0', "line 1 is no JSON"),
        (
            RATES.replace("600,100", "600,-1"),
            "line 3: requests_per_second='-1' is not a finite number from 0",
        ),
        (RATES.replace("600,100", "600,nan"), "line 3: requests_per_second='nan'.*; correct it, or leave"),
        (RATES.replace("600,100", "600,inf"), "line 3: requests_per_second='inf'"),
        (RATES.replace("600,100", "inf,100"), "line 3: start_seconds='inf'"),
        (RATES.replace("100,1.5", "100,inf"), "line 3: rate_weighted_cv='inf'"),
        (RATES.replace("1200,50", "600,50"), "line 4: start_seconds='600' is not after 600"),
        ("a,b,c\n1,2,3\n", "no known format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, want: str) -> None:
    with pytest.raises(InputFileError, match=want):
        read_trace(write(tmp_path, text))


def test_our_own_rows_are_read_as_the_simulator_reads_them(tmp_path: Path) -> None:
    rows = (
        '{"at_seconds": 3, "prompt_tokens": 40, "output_tokens": 2, '
        '"hash_ids": [3], "hash_block_tokens": 64}\n'
        '{"at_seconds": 5.5, "prompt_tokens": 7, "output_tokens": 1}\n'
    )
    trace = read_trace(write(tmp_path, rows))
    assert [(one.at_seconds, one.input_tokens) for one in trace.requests] == [(0.0, 40), (2.5, 7)]
    assert block_tokens(trace.requests) == 64
    mixed = read_trace(write(tmp_path, rows + rows.replace("64", "32")))
    with pytest.raises(InputFileError, match="hash_block_tokens=32 and =64; write one size"):
        block_tokens(mixed.requests)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    want = "--trace '.*nowhere' cannot be read: No such file or directory; check the path"
    with pytest.raises(InputFileError, match=want):
        read_trace(tmp_path / "nowhere")


def test_a_single_window_lasts(tmp_path: Path) -> None:
    (window,) = read_trace(write(tmp_path, "start_seconds,requests_per_second\n0,5\n")).windows
    assert math.isinf(window.end_seconds)
