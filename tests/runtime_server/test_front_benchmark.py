"""What the benchmark of the HTTP side counts, and that its page explains what it shows."""

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.front.load import steady_middle
from benchmarks.front.page import render, verdicts
from benchmarks.front.rows import ROWS

ROOT = Path(__file__).parents[2]
KEYS = (
    "tokens_per_second",
    "p50_milliseconds",
    "p99_milliseconds",
    "spread_p50_milliseconds",
    "front_microseconds",
    "engine_microseconds",
    "load_microseconds",
    "health_p99_milliseconds",
    "health_worst_milliseconds",
)


def page_of(*names: str) -> str:
    return render({name: [dict.fromkeys(KEYS, 1.0)] for name in names}, "- Machine: none")


def test_beginning_and_end_of_a_run_do_not_count() -> None:
    window = steady_middle(100.0, 6.0)
    assert window.seconds == 5.0
    assert [second for second in range(98, 110) if second * 10**9 in window] == [101, 102, 103, 104, 105]


def test_the_page_explains_its_rows_and_names_those_left_out() -> None:
    every = [row.name for row in ROWS]
    whole = page_of(*every)
    assert "Rows left out" not in whole
    for word in re.findall(r"\*([^*]+)\*:", whole):
        shown = whole.partition("\n*")[0]
        assert word == "(N/s)" or all(one.strip() in shown for one in word.split(",")), word
    short = page_of("20,000 tokens/s")
    assert "*as fast as it goes*" not in short
    assert "*floor*" not in short
    (left_out,) = [line for line in short.splitlines() if line.startswith("Rows left out")]
    assert all(name in left_out for name in every if name != "20,000 tokens/s")


def test_a_worst_is_the_worst_of_all_rounds() -> None:
    rounds = [dict.fromkeys(KEYS, value) for value in (1.0, 9.0, 2.0)]
    (row,) = [line for line in render({"x": rounds}, "").splitlines() if line.startswith("| x |")]
    assert row.endswith("| 2.0 | 9.0 |")


def test_goals_stand_beside_what_was_measured_with_their_misses() -> None:
    name = "20,000 tokens/s"
    kept = {**dict.fromkeys(KEYS, 1.0), "tokens_per_second": 19_900.0, "health_worst_milliseconds": 49.0}
    slow = {**kept, "health_worst_milliseconds": 51.0}
    line, best = verdicts({name: [kept, kept, kept]})
    assert line.startswith(f"- {name}: 19,900 tokens/s, 99.5% of the pace, with 1.0 ms at P99 (goal 20: met)")
    assert line.endswith("; slowest /health 49.0 ms (goal 50: met)")
    assert best.endswith("19,900 (goal 20,000: missed)")
    line, _ = verdicts({name: [kept, slow, kept]})
    assert "51.0 ms (goal 50: missed)" in line
    more = {**kept, "tokens_per_second": 29_000.0}
    *_, best = verdicts({name: [kept], "30,000 tokens/s": [more]})
    assert best.endswith("29,000 (goal 20,000: met)")
    line, best = verdicts({"30,000 tokens/s": [{**more, "p99_milliseconds": 20.0}]})
    assert "96.7% of the pace, with 20.0 ms at P99 (goal 20: missed)" in line
    assert "/health" not in line
    assert best.endswith(": 0 (goal 20,000: missed)")
    assert verdicts({"as fast as it goes": [kept], "20,000 tokens/s, floor": [kept]}) == []


def test_a_short_run_counts_what_the_engine_gave(tmp_path: Path) -> None:
    command, page = [sys.executable, "-m", "benchmarks.front.run"], tmp_path / "page.md"
    done = subprocess.run(
        [*command, "--seconds=2.5", "--rounds=1", "--only=of 64 tokens", f"--output={page}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("round 1")]
    report = json.loads(line[line.index("{") :])
    # Never more than the pace; less, where the machine is busy with other things.
    assert 1000 < report["tokens_per_second"] <= 20_200
    assert "Rows left out of this run" in page.read_text()
