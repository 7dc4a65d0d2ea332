"""Whole runs of the command against a small server of known delays and faults."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headway_bench.report import SCHEMA

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench, SmallServer

SHORT = ("--input-length=8", "--output-length=4")


def test_known_delays_are_measured(small_server: "SmallServer", run_bench: "RunBench") -> None:
    small_server.always(delay_seconds=0.08, pace_seconds=0.02)
    done = run_bench("--concurrency", "2", "--num-requests", "12", "--input-length=8", "--output-length=6")
    assert done.status == 0
    latency = done.summary["latency_milliseconds"]
    for name, want in (("ttft", 80), ("tpot", 20), ("itl", 20), ("e2e", 180)):
        # An event read late makes the gap after it short, so that a gap has no least value; a median has.
        assert 0.7 * want <= latency[name]["percentiles"]["50"]["value"] < 2 * want + 30, (
            name,
            latency[name],
        )
    assert latency["ttft"]["minimum"] >= 80 - 1.5, "never sooner than the server sends"
    assert latency["e2e"]["minimum"] >= 180 - 6 * 1.5
    assert done.summary["num_completed"] == 12
    assert done.summary["tokens"]["output_tokens"] == 72
    assert done.summary["tokens"]["input_as_wanted"]["value"] == 1


def test_tokens_that_come_together_are_told_by_usage(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.always(events=(1, 5, 2), pace_seconds=0.02)
    done = run_bench("--num-requests", "3", "--input-length=8", "--output-length=8")
    assert {tuple(request["event_tokens"]) for request in done.requests} == {(1, 5, 2)}
    assert {request["counted_by"] for request in done.requests} == {"usage"}
    # 40 ms for seven tokens.
    assert 5 <= done.summary["latency_milliseconds"]["tpot"]["percentiles"]["50"]["value"] < 15


def test_a_tokenizer_tells_what_the_server_does_not(
    small_server: "SmallServer", run_bench: "RunBench", tokenizer_folder: Path
) -> None:
    small_server.always(events=(1, 5, 2), usage="at the end")
    flags = ("--num-requests", "2", "--input-length=8", "--output-length=8")
    plain = run_bench(*flags)
    assert {request["counted_by"] for request in plain.requests} == {"events"}
    assert "ITL is between events" in plain.output
    told = run_bench(*flags, "--tokenizer", str(tokenizer_folder))
    assert {request["counted_by"] for request in told.requests} == {"tokenizer"}
    first, second, _ = told.requests[0]["event_tokens"]
    assert second > 2 * first


def test_an_open_loop_does_not_wait_for_slow_answers(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.always(delay_seconds=0.5)
    flags = ("--request-rate", "100", "--arrivals", "constant", "--num-requests", "50", *SHORT)
    done = run_bench(*flags)
    due = [request["due"] for request in done.requests]
    assert due == pytest.approx([10 * n for n in range(50)], abs=0.01)
    assert max(request["sent"] for request in done.requests) < 700, "sent while the first were unanswered"
    assert small_server.most_at_once > 25
    assert done.summary["client"]["lag_milliseconds"]["count"] == 50
    for request in done.requests:
        assert request["sent"] >= request["due"]


def test_a_closed_loop_keeps_as_many_busy_as_asked(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.always(delay_seconds=0.02)
    done = run_bench("--concurrency", "3", "--num-requests", "30", *SHORT)
    assert small_server.most_at_once == 3
    assert done.summary["num_completed"] == 30
    assert done.summary["client"]["connections_opened"] <= 3, "connections are used again"


def test_a_load_ends_after_its_duration_and_awaits_its_answers(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.always(delay_seconds=0.05)
    flags = ("--request-rate", "50", "--arrivals", "constant", "--duration-seconds", "0.5")
    done = run_bench(*flags, "--warmup-seconds", "0.2", *SHORT)
    assert (done.summary["num_warmup"], done.summary["num_completed"]) == (10, 25)
    assert [request["is_warmup"] for request in done.requests] == [True] * 10 + [False] * 25


def test_warm_up_requests_come_on_top_and_are_left_out(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.sometimes(range(3), delay_seconds=0.3)
    done = run_bench("--num-requests", "5", "--warmup-requests", "3", *SHORT)
    assert (done.summary["num_warmup"], done.summary["num_completed"]) == (3, 5)
    assert done.summary["latency_milliseconds"]["ttft"]["maximum"] < 250


def test_users_come_one_after_the_other_in_a_ramp(small_server: "SmallServer", run_bench: "RunBench") -> None:
    small_server.always(delay_seconds=1.0)
    done = run_bench("--concurrency", "4", "--num-requests", "4", "--ramp-seconds", "0.4", *SHORT)
    assert [request["due"] for request in done.requests] == pytest.approx([0, 100, 200, 300], abs=0.01)


def test_a_conversation_grows_with_the_real_answers(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.always(events=(1, 2))
    flags = ("--num-requests", "3", "--turns", "3", "--think-seconds", "0.05", *SHORT)
    done = run_bench(*flags)
    first, second, third = (body["messages"] for body in small_server.asked)
    assert second[:1] == first
    assert second[1] == {"role": "assistant", "content": "la la la "}
    assert third[:3] == second
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]
    ended, due = done.requests[0]["ended"], done.requests[1]["due"]
    assert 50 <= due - ended < 90
    small_server.bodies.clear()
    run_bench(*flags, "--endpoint", "completions")
    first, second, third = (body["prompt"] for body in small_server.asked)
    assert second.startswith(f"{first}la la la \n")
    assert third.startswith(f"{second}la la la \n")


def test_what_every_request_carries(small_server: "SmallServer", run_bench: "RunBench") -> None:
    flags = ("--num-requests", "2", *SHORT, "--ignore-eos", "--api-key", "k1", "--header", "X-Tenant: t")
    more = ("--extra-body", '{"top_p": 0.5, "priority": 3}', "--max-tokens-field", "max_tokens")
    run_bench(*flags, *more, "--temperature", "0.7", "--model", "named")
    for body, headers in zip(small_server.bodies, small_server.headers, strict=True):
        assert (body["top_p"], body["priority"], body["temperature"]) == (0.5, 3, 0.7)
        assert (body["model"], body["ignore_eos"], body["stream"]) == ("named", True, True)
        assert headers["authorization"] == "Bearer k1"
        assert headers["x-tenant"] == "t"
        assert headers["accept-encoding"] == "identity"


def test_a_server_that_refuses_richer_usage_is_asked_for_less(
    small_server: "SmallServer", run_bench: "RunBench"
) -> None:
    small_server.refuse_unknown = True
    small_server.always(usage="at the end")
    done = run_bench("--num-requests", "2", *SHORT)
    assert done.summary["num_completed"] == 2
    assert done.report["conditions"]["stream_options"] == {"include_usage": True}
    assert {tuple(body["stream_options"]) for body in small_server.asked} == {("include_usage",)}


def test_lengths_are_approximate_only_where_nothing_can_count(
    small_server: "SmallServer", run_bench: "RunBench", tokenizer_folder: Path
) -> None:
    def used(*flags: str) -> str:
        source = run_bench("--num-requests", "1", *SHORT, *flags).report["conditions"]["prompt_lengths"]
        return str(source)

    assert used() == "server"
    assert used("--tokenizer", str(tokenizer_folder)) == "tokenizer"
    assert used("--endpoint", "completions", "--prompt-lengths", "ids") == "ids"
    assert len(small_server.asked[-1]["prompt"]) == 8
    small_server.has_tokenize = False
    assert used() == "words"
    assert run_bench("--prompt-lengths", "server").status == 1


def test_a_sweep_runs_each_value_with_prompts_of_its_own(
    small_server: "SmallServer", run_bench: "RunBench", tmp_path: Path
) -> None:
    plot = tmp_path / "sweep.svg"
    flags = ("--concurrency", "1", "2", "--num-requests", "6", "--sweep-pause-seconds", "0", *SHORT)
    done = run_bench(*flags, "--plot", str(plot), "--slo", "ttft:1000")
    assert [point["concurrency"] for point in done.report["points"]] == [1, 2]
    prompts = [body["messages"][0]["content"] for body in small_server.asked]
    assert len(set(prompts)) == 12
    assert done.output.count("== ") == 2
    assert "TTFT P50" in done.output
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("name", ["one.png", "one.pdf"])
def test_one_point_is_drawn_over_time(run_bench: "RunBench", tmp_path: Path, name: str) -> None:
    plot = tmp_path / name
    assert run_bench("--num-requests", "4", "--warmup-requests=1", *SHORT, "--plot", str(plot)).status == 0
    assert plot.stat().st_size > 5000


@pytest.mark.parametrize(
    "flags", [("--plot", "picture.gif"), ("--plot", "nowhere/a.png"), ("--json", "nowhere/a.json")]
)
def test_what_could_not_be_written_is_refused_before_anything_is_sent(
    small_server: "SmallServer", run_bench: "RunBench", flags: tuple[str, str]
) -> None:
    assert run_bench(*flags).status == 2
    assert small_server.bodies == []


def test_the_report_names_its_schema_and_its_conditions(run_bench: "RunBench") -> None:
    done = run_bench(
        "--num-requests", "3", *SHORT, "--seed", "11", "--api-key", "s3cret", "--slo", "ttft:900"
    )
    report, conditions = done.report, done.report["conditions"]
    assert report["schema"] == SCHEMA
    assert set(report) == {"schema", "conditions", "workload", "points"}
    assert conditions["seed"] == 11
    assert conditions["server"]["version"] == "0.0-small"
    assert conditions["server"]["model"] == "small"
    assert conditions["client"]["num_cpus"] == os.cpu_count()
    assert "s3cret" not in json.dumps(report)
    assert done.summary["goodput"]["share"]["value"] == 1
    assert "goodput" in done.output


def test_the_same_seed_asks_the_same(small_server: "SmallServer", run_bench: "RunBench") -> None:
    def asked(seed: str) -> list[object]:
        small_server.bodies.clear()
        flags = ("--request-rate", "100", "--num-requests", "5", "--input-length", "uniform:3:30")
        done = run_bench(*flags, "--output-length", "uniform:2:9", "--seed", seed)
        # They are sent 10 ms apart; on a busy machine one may overtake another.
        bodies = sorted(json.dumps(one, sort_keys=True) for one in small_server.asked)
        return [bodies, [request["due"] - done.requests[0]["due"] for request in done.requests]]

    first, again, other = asked("4"), asked("4"), asked("5")
    assert first[0] == again[0]
    assert first[1] == pytest.approx(again[1], abs=0.01)
    assert first[0] != other[0]


def test_a_trace_of_requests_is_replayed(
    small_server: "SmallServer", run_bench: "RunBench", tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 600, 3, [0, 1]), (500, 700, 4, [0, 2]), (1000, 20, 2, [])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    done = run_bench("--trace", str(trace), "--trace-speed", "5")
    assert [request["due"] for request in done.requests] == pytest.approx([0, 100, 200], abs=0.01)
    assert [request["input_tokens"] for request in done.requests] == [600, 700, 20]
    assert [request["output_tokens"] for request in done.requests] == [3, 4, 2]
    first, second, _ = (body["messages"][0]["content"].split() for body in small_server.asked)
    assert first[:512] == second[:512]
    # With a rate or users of the user's own, the trace only gives the lengths.
    done = run_bench("--trace", str(trace), "--concurrency", "1", "--num-requests", "4")
    assert [request["input_tokens"] for request in done.requests] == [600, 700, 20, 600]
    assert run_bench("--trace", str(trace), "--turns", "2").status == 2


def test_a_trace_of_rates_says_how_fast(run_bench: "RunBench", tmp_path: Path) -> None:
    trace = tmp_path / "rates.csv"
    trace.write_text("start_seconds,requests_per_second\n0,100\n10,0\n20,300\n")
    flags = ("--trace-speed", "50", "--trace-rate-scale", "0.02", *SHORT, "--arrivals", "constant")
    done = run_bench("--trace", str(trace), *flags)
    due = [request["due"] for request in done.requests]
    assert sum(at < 199.9 for at in due) == 20
    assert sum(at >= 399.9 for at in due) == 60
    assert len(due) == 80
    assert run_bench("--trace", str(trace), "--concurrency", "2").status == 2


def test_a_dataset_gives_prompts_and_lengths(
    small_server: "SmallServer", run_bench: "RunBench", tmp_path: Path
) -> None:
    turns = [("human", "Why is it so?"), ("gpt", "x" * 40), ("human", "And then?"), ("gpt", "y" * 8)]
    rows = [
        {"conversations": [{"from": who, "value": text} for who, text in turns]},
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                *_said("user", "Hm?", "assistant", "z" * 20),
            ]
        },
        {"conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
    ]
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(rows))
    run_bench("--dataset", str(path), "--num-requests", "6", "--turns", "2")
    asked = {body["messages"][-1]["content"]: body["max_tokens"] for body in small_server.asked}
    assert asked == {"Why is it so?": 10, "And then?": 2, "Hm?": 5}
    small_server.bodies.clear()
    path.write_text("\n".join(json.dumps(row) for row in rows))
    run_bench(
        "--dataset", str(path), "--num-requests", "4", "--output-length", "7", "--max-input-length", "2"
    )
    assert {body["messages"][-1]["content"] for body in small_server.asked} == {"Hm?"}
    assert {body["max_tokens"] for body in small_server.asked} == {7}
    path.write_text("[]")
    assert run_bench("--dataset", str(path)).status == 2


def _said(*parts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(parts[::2], parts[1::2], strict=True)]
