"""Services drawn by number: which they are, what is measured of each, and what is printed."""

import json
from pathlib import Path

import pytest
from benchmarks.slo import scenarios
from benchmarks.slo.run import TRACES

from headway_simulator.flags import build_parser

FILES = {name: Path(f"/traces/{name}") for name in TRACES}


def test_a_number_stands_for_a_case_and_all_kinds_come() -> None:
    cases = [scenarios.flags(number, FILES) for number in range(200)]
    assert cases == [scenarios.flags(number, FILES) for number in range(200)]
    read = [build_parser().parse_args(case) for case in cases]
    assert {one.generate for one in read} == {"poisson", "gamma", "diurnal", None}
    assert {one.trace for one in read} == {*FILES.values(), None}
    assert {one.percentile for one in read} == {90, 95, 99}


@pytest.mark.parametrize("there", [(), ("azure",), ("servegen",)])
def test_a_trace_that_is_missing_is_in_no_case(there: tuple[str, ...]) -> None:
    files = {name: FILES[name] for name in there}
    cases = [build_parser().parse_args(scenarios.flags(number, files)) for number in range(100)]
    wanted = {None, *(files[name] for name in there if name == "azure")}
    assert {one.trace for one in cases} == wanted, "ServeGen's rates need lengths"
    assert {one.lengths for one in cases if one.generate} == {files.get("azure")}


def test_each_is_met_by_headway_and_by_fixed_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "SECONDS", 40)
    for name in TRACES:
        monkeypatch.delenv(f"HEADWAY_TRACE_{name.upper()}", raising=False)
    out = tmp_path / "cases.json"
    assert scenarios.main(["--number", "2", "--jobs", "1", "--out", str(out)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert len(first) == 3
    assert first[-1].startswith("attained ")
    assert scenarios.main(["--first", "1", "--number", "1", "--jobs", "1", "--against", str(out)]) == 0
    again, now, before = capsys.readouterr().out.splitlines()
    found = scenarios.Outcome(**json.loads(out.read_text())["cases"][1])
    assert again == scenarios.line(found, found)
    assert now == scenarios.summary([found])
    assert before == f"before: {now}"


def test_costs_are_compared_where_both_attain() -> None:
    kept = scenarios.Outcome(0, 95.0, 0.95, 3.0, 0.0, 2, 2.0)
    missed = scenarios.Outcome(1, 95.0, 0.9499, 9.0, 4.0, 2, 2.0)
    nobody = scenarios.Outcome(2, 99.0, 0.99, 5.0, 0.0, None, None)
    told = scenarios.summary([kept, missed, nobody])
    assert told == "attained 2 of 3, 17.0 GPU-hours, 1.50 times the least fixed numbers where both attain"
    assert scenarios.summary([nobody]) == "attained 1 of 1, 5.0 GPU-hours"
    assert "!" in scenarios.line(missed, None)
    assert "no fixed number" in scenarios.line(nobody, None)
