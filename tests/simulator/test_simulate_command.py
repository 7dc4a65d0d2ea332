"""`headway simulate` as users run it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.conftest import ROW

from headway.cli import main as headway_main
from headway_simulator import options
from headway_simulator.cluster import Simulation
from headway_simulator.simulate_command import main


def test_a_trace_alone_gives_the_report_with_the_oracle(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert headway_main(["simulate", "--trace", str(trace), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["objective"] == 0.95
    assert report["num_arrivals"] == 240
    assert report["joint_attainment"] >= 0.95
    assert report["gpu_hours"] == pytest.approx(2 * 120 / 3600)
    assert report["oracle_gpu_hours"] == pytest.approx(2 * 120 / 3600)
    assert report["cost_over_oracle"] == pytest.approx(1.0)
    assert report["reversals_per_hour"] == 0
    # Three times what the prompt of 300 tokens takes alone.
    assert report["targets"] == {"ttft_milliseconds": 67.0, "tpot_milliseconds": 26.0}
    assert len(report["timeline"]) == 2
    shown = capsys.readouterr()
    assert "240 requests" in shown.out
    assert "a replica's steps as 'llama-3.1-8b-a100-tp2' has them, on 2 GPUs" in shown.out
    assert "1.00 times that" in shown.out
    assert not shown.err  # A progress bar is for terminals.


def test_a_run_that_nobody_can_undercut_is_the_oracles_too(
    trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    """One replica, which attains the objective; with two at first another could do it for less."""
    alone, searched = (simulated("--trace", trace, "--initial-replicas", number) for number in (1, 2))
    assert [one["oracle"]["num_simulated"] > 0 for one in (alone, searched)] == [False, True]
    for name in ("replicas", "is_attained", "ended_by_budget"):
        assert alone["oracle"][name] == searched["oracle"][name]
    assert alone["oracle_gpu_hours"] == pytest.approx(searched["oracle_gpu_hours"])
    assert alone["oracle"]["measures"]["joint_attainment"] == alone["joint_attainment"]
    assert alone["oracle"]["least_replica_hours"] == pytest.approx(alone["replica_hours"])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--missing-samples", 0.2), id="samples"),
        pytest.param(("--deaths-per-pod-hour", 0.001), id="deaths"),
        pytest.param(("--step-time-error", 2), id="steps told wrong"),
        pytest.param(("--ttft-milliseconds", 8, "--max-replicas", 1), id="missed"),
    ],
)
def test_the_oracle_is_spared_faults_and_looked_for_where_the_objective_is_missed(
    flags: tuple[object, ...], trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    assert simulated("--trace", trace, *flags)["oracle"]["num_simulated"] > 0


def test_a_terminal_sees_the_progress(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert headway_main(["simulate", "--trace", str(trace), "--initial-replicas", "2"]) == 0
    bars = capsys.readouterr().err
    assert "headway: 100%" in bars
    assert "oracle: 100%" in bars


def test_flags_reach_the_simulation(trace: Path, simulated: Callable[..., dict[str, Any]]) -> None:
    report = simulated(
        *("--trace", trace, "--no-oracle", "--percentile", 99, "--ttft-milliseconds", 700),
        *("--tpot-milliseconds", 33, "--min-replicas", 2, "--max-replicas", 3, "--half", "verdict"),
        *("--rate-scale", 2, "--cold-start-seconds", 10, "--seed", 7, "--step-model", "llama-2-70b-h100-tp8"),
    )
    assert report["objective"] == 0.99
    assert report["targets"] == {"ttft_milliseconds": 700.0, "tpot_milliseconds": 33.0}
    assert report["scaling"] == {"min_replicas": 2, "max_replicas": 3}
    assert report["num_arrivals"] == 240
    assert report["trace"]["duration_seconds"] == pytest.approx(60.0)
    assert report["conditions"]["cold_start_seconds"] == 10
    assert report["conditions"]["seed"] == 7
    assert report["mean_replicas"] >= 2
    assert report["step_model"]["gpus"] == 8
    assert report["oracle"] is None
    assert report["oracle_gpu_hours"] is None


def test_a_baseline_is_in_control_where_it_is_named(
    trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    assert simulated("--trace", trace, "--no-oracle")["controller"] == "headway"
    flags = ("--no-oracle", "--initial-replicas", 3, "--routing", "prefix-aware", "--step-time-error", 2)
    report = simulated("--trace", trace, "--controller", "keda-waiting-5", *flags)
    assert report["controller"] == "keda-waiting-5"
    assert set(report["causes"]) == {"BetweenSyncs", "Synced"}
    assert report["token_budget_reversals_per_hour"] == 0.0
    assert report["conditions"]["routing"] == "prefix-aware"
    assert report["conditions"]["step_time_error"] == 2


def test_rates_are_scaled_and_take_lengths_from_another_trace(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("start_seconds,requests_per_second\n0,100\n120,300\n")
    report = simulated("--trace", rates, "--rate", 2, "--lengths", trace, "--no-oracle")
    assert report["trace"]["duration_seconds"] == 240
    assert report["trace"]["requests_per_second"] == pytest.approx(2.0, rel=0.15)


def test_of_rates_of_too_many_requests_few_are_taken_and_it_is_said(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weeks at 196 a second, given alone."""
    monkeypatch.setattr(options, "FEW_REQUESTS", 480)
    rates = tmp_path / "rates.csv"
    rates.write_text("start_seconds,requests_per_second\n0,100000\n120,300000\n")
    report = simulated("--trace", rates, "--lengths", trace, "--no-oracle")
    assert report["trace"]["requests_per_second"] == pytest.approx(2.0, rel=0.15)
    told = "rates.csv (at 2 requests/s for 2e+05, which are too many; --rate asks for others)"
    assert report["trace"]["name"] == told
    rates.write_text("start_seconds,requests_per_second\n0,1\n120,3\n")
    assert simulated("--trace", rates, "--lengths", trace, "--no-oracle")["trace"]["name"] == "rates.csv"


@pytest.mark.parametrize(
    "part",
    [("--end-seconds", 120), ("--start-seconds", 120), ("--half", "verdict"), ("--start-seconds", 60)],
    ids=["its beginning", "its end", "its second half", "from within a window"],
)
def test_rates_are_scaled_over_what_is_taken_of_them(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]], part: tuple[str, object]
) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("start_seconds,requests_per_second\n0,100\n120,900\n")
    report = simulated("--trace", rates, "--rate", 3, "--lengths", trace, "--no-oracle", *part)
    assert report["trace"]["requests_per_second"] == pytest.approx(3.0, rel=0.15)


def test_no_requests_are_made_of_rates_that_are_left_out(
    trace: Path, tmp_path: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("start_seconds,requests_per_second\n0,9e9\n60,3\n180,9e9\n240,0\n")
    part = ("--start-seconds", 60, "--end-seconds", 180)
    report = simulated("--trace", rates, "--lengths", trace, "--no-oracle", *part)
    assert report["trace"]["requests_per_second"] == pytest.approx(3.0, rel=0.15)
    assert report["trace"]["duration_seconds"] == 120


def test_a_wave_is_whole_where_nothing_says_how_long_it_is(
    trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    flags = ("--generate", "diurnal", "--rate", 3, "--duration-seconds", 240, "--lengths", trace)
    report = simulated(*flags, "--no-oracle", "--factor", 8)
    assert report["trace"]["requests_per_second"] == pytest.approx(3.0, rel=0.15)
    first, second, third, last = (one["requests_per_second"] for one in report["timeline"])
    assert min(second, third) > 2 * max(first, last)


def test_made_up_loads_have_recovery_times(simulated: Callable[..., dict[str, Any]]) -> None:
    report = simulated(
        "--generate", "step", "--rate", 1, "--duration-seconds", 300, "--factor", 2, "--no-oracle"
    )
    assert report["recovery_seconds"] is not None
    assert report["trace"]["duration_seconds"] == 300


def test_guesses_make_tokens_come_faster(trace: Path, simulated: Callable[..., dict[str, Any]]) -> None:
    flags = ("--trace", trace, "--no-oracle", "--end-seconds", 30)
    plain = simulated(*flags)
    guessed = simulated(*flags, "--num-speculative-tokens", 3, "--acceptance", 0.9)
    assert guessed["tpot_milliseconds"] < 0.7 * plain["tpot_milliseconds"]


def test_the_same_seed_gives_the_same_report(simulated: Callable[..., dict[str, Any]]) -> None:
    flags = (
        "--generate",
        "gamma",
        "--rate",
        2,
        "--duration-seconds",
        120,
        "--no-oracle",
        "--missing-samples",
        0.3,
    )

    def report(seed: int) -> dict[str, Any]:
        found = simulated(*flags, "--seed", seed)
        del found["seconds_taken"]
        return found

    assert report(1) == report(1)
    assert report(1) != report(2)


def test_a_plot_is_drawn(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    assert main(["--trace", str(trace), "--plot", str(picture), "--quiet"]) == 0
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert len(drawn) > 10_000


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--trace", "none.csv"], "none.csv cannot be read"),
        (["--trace", "TRACE", "--rate", "3"], "--rate=3.0 is of --generate and of CSVs of rates"),
        (["--trace", "TRACE", "--factor", "3"], "--factor=3.0 is of --generate"),
        (["--trace", "TRACE", "--start-seconds", "500"], "--start-seconds=500 is not before the load's end"),
        (["--trace", "TRACE", "--start-seconds", "9", "--end-seconds", "8"], "not before --end-seconds 8;"),
        (["--trace", "TRACE", "--min-replicas", "70"], "--min-replicas=70 is more than --max-replicas=64;"),
        (["--trace", "TRACE", "--rate-scale", "1e-9"], "or raise --rate-scale=1e-09"),
        (["--trace", "TRACE", "--no-oracle", "--jobs", "2"], "--jobs=2 is of the oracle"),
        (["--trace", "TRACE", "--scrape-delay-seconds", "120"], "--scrape-delay-seconds=120: nothing is dec"),
        (["--trace", "TRACE", "--interval-seconds", "1e9"], "--interval-seconds=1e+09: nothing is decided"),
        (["--trace", "TRACE", "--json", "TRACE"], "is the file of --trace; name another"),
        (["--trace", "TRACE", "--json", "a.svg", "--plot", "./a.svg"], "is the file of --json; name another"),
        (["--generate", "diurnal", "--period-seconds", "1"], "--period-seconds=1 is less than 10"),
        (["--trace", "TRACE", "--step-model", "gpt"], "step model 'gpt' is neither"),
        (["--trace", "TRACE", "--service", "none"], "--service=none: cannot be read"),
        (["--trace", "TRACE", "--plot", "a.gif"], "--plot='a.gif' must end in"),
        (["--trace", "TRACE", "--json", "no/folder/out"], "there is no folder 'no/folder'"),
        (["--trace", "TRACE", "--json", "/"], "--json='/' is a folder; name a file in it"),
        (["--trace", "TRACE", "--plot", "/" + 300 * "a" + ".png"], "cannot be written: File name too long"),
        (["--generate", "poisson", "--factor", "3"], "--factor=3.0 is of --generate diurnal and step"),
        (["--generate", "step", "--variation", "3"], "--variation=3.0 is of --generate gamma"),
        (["--generate", "gamma", "--period-seconds", "9"], "--period-seconds=9.0 is of --generate diurnal"),
        (["--trace", "TRACE", "--acceptance", "0.5"], "--acceptance=0.5 is of guesses, and there are none"),
        (
            ["--trace", "TRACE", "--ttft-milliseconds", "9", "--tpot-milliseconds", "9", "--slo-factor", "2"],
            "--slo-factor=2 makes targets",
        ),
        (["--generate", "step", "--lengths", "none.csv"], "none.csv cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], want: str
) -> None:
    assert main([str(trace) if one == "TRACE" else one for one in flags]) == 2
    shown = capsys.readouterr().err
    assert want in shown
    assert "Traceback" not in shown


def test_what_cannot_be_written_is_told_before_anything_is_simulated(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "result", lambda simulation: pytest.fail("it was simulated"))
    assert main(["--trace", str(trace), "--json", str(tmp_path / (300 * "a"))]) == 2
    assert "cannot be written: File name too long" in capsys.readouterr().err
    # Trying it out leaves nothing behind, and what is there as it is.
    there, other = tmp_path / "there.json", tmp_path / "other.json"
    there.write_text("kept")
    for path in (there, other):
        assert main(["--trace", "none.csv", "--json", str(path)]) == 2
    assert there.read_text() == "kept"
    assert not other.exists()
    link = tmp_path / "link.json"
    link.symlink_to(other)
    assert main(["--trace", "none.csv", "--json", str(link)]) == 2
    assert link.is_symlink()
    assert not other.exists()


def test_a_report_outlives_whoever_reads_along(trace: Path, tmp_path: Path) -> None:
    """Minutes of simulation are written before the first line can fail."""
    out = tmp_path / "out.json"
    flags = ["simulate", "--trace", str(trace), "--no-oracle", "--quiet", "--json", str(out)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headway", *flags],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 74
    assert done.stderr == "headway simulate: standard output cannot be written: No space left on device\n"
    assert json.loads(out.read_text())["num_arrivals"] == 240


def test_who_ends_the_search_for_the_oracle_keeps_the_rest(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway_simulator.simulate_command.find_oracle", ended)
    out = tmp_path / "out.json"
    flags = ["--trace", str(trace), "--initial-replicas", "2", "--quiet"]
    assert main([*flags, "--json", str(out)]) == 130
    report = json.loads(out.read_text())
    assert (report["num_arrivals"], report["oracle"], report["oracle_gpu_hours"]) == (240, None, None)
    assert "240 requests" in capsys.readouterr().out


def test_a_flag_that_comes_twice_counts_as_it_comes_last(
    trace: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    flags = ["--trace", trace, "--no-oracle", "--percentile", "90", "--percentile", "80"]
    assert simulated(*flags)["objective"] == 0.8


def test_percentiles_of_some_say_so(
    trace: Path, simulated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    simulated("--trace", trace, "--no-oracle")
    assert "of those that were answered" not in capsys.readouterr().out
    assert simulated("--trace", trace, "--no-oracle", "--deaths-per-pod-hour", "600")["num_lost"] > 0
    assert "TPOT " in (line := next(one for one in capsys.readouterr().out.splitlines() if "P95" in one))
    assert line.endswith(", of those that were answered")


def test_a_load_of_moments_begins_with_what_its_work_takes_in_a_minute(
    tmp_path: Path, simulated: Callable[..., dict[str, Any]]
) -> None:
    path = tmp_path / "moment.jsonl"
    path.write_text("".join(json.dumps({**ROW, "at_seconds": at}) + "\n" for at in (0.0, 0.007)))
    assert simulated("--trace", path, "--no-oracle")["conditions"]["initial_replicas"] == 1


@pytest.mark.parametrize("seconds", [30, 60, 90])
def test_a_short_load_begins_with_what_it_needs(
    seconds: int, simulated: Callable[..., dict[str, Any]]
) -> None:
    """None that is asked for would be ready in time, with a cold start of a minute."""
    flags = ("--generate", "poisson", "--rate", 12, "--duration-seconds", seconds, "--no-oracle")
    found = simulated(*flags)
    assert found["conditions"]["initial_replicas"] == 3
    assert found["joint_attainment"] >= 0.95


def test_a_request_larger_than_the_cache_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({**ROW, "prompt_tokens": 2_000_000}))
    assert main(["--trace", str(path)]) == 2
    assert "2000041 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--slo", "ttft=50,p99=1"], "--slo: 'p99=1' is no part of a promise; write ttft=500,tpot=50"),
        (["--slo", "percentile=100"], "--slo: 'percentile=100': '100' is out of range; give from"),
        (["--slo", "ttft=5,ttft=6"], "--slo: 'ttft=6' comes a second time"),
        (["--slo", "fast"], "--slo: 'fast' is not a number"),
        (["--slo-factor", "2", "--slo", "3"], "--slo: --slo-factor is given already"),
        (["--slo", "3", "--slo-factor", "2"], "--slo-factor: --slo gives it already; leave out one of them"),
        (["--slo", "ttft=9,tpot=9", "--tpot-milliseconds", "9"], "--tpot-milliseconds: --slo gives it alre"),
        (["--slo", "ttft=,tpot=9"], "--slo: 'ttft=': '' is not an integer"),
        (["--json", ""], "--json: '' is no file; name one"),
    ],
)
def test_a_promise_that_says_nothing_clear_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], want: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", str(trace), *flags])
    assert want in capsys.readouterr().err
