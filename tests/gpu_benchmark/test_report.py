"""What a run writes down, when it stops, and what it leaves of earlier runs; which tokens are wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.gpu.checks import judge
from benchmarks.gpu.report import DeviceLost, Report, Row, TimeUp

H200: Row = {"device": "NVIDIA H200", "commit": "a"}


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(out: Path) -> Any:
    return json.loads(out.read_text())


def found(out: Path) -> dict[tuple[str, str], Row]:
    return {(row["stage"], row["name"]): row for row in told(out)["rows"]}


def test_what_fails_is_written_down_and_the_rest_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    report = Report(out, {}, seconds=60)

    def fail() -> Row:
        raise RuntimeError("out of memory")

    report.row("engine", "first", fail)
    report.row("engine", "second", lambda: {"x": 1.0})
    first, second = json.loads(out.read_text())["rows"]
    assert first["error"] == "RuntimeError: out of memory"
    assert second["x"] == 1.0
    assert not report.is_right


def test_no_row_is_begun_without_time_for_it(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    report = Report(out, {}, seconds=60)
    assert report.row("engine", "long", lambda: {"x": 1}, needs_seconds=90) is None
    assert report.row("engine", "short", lambda: {"x": 1}, needs_seconds=30) is not None
    assert told(out)["runs"][0]["left_out"] == ["long"]
    assert report.is_right
    assert report.num_measured == 1


def test_a_stage_is_added_to_what_other_runs_found(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    first = Report(out, H200, seconds=60)
    first.row("machine", "ceilings", lambda: {"x": 0})
    first.row("peers", "theirs", lambda: {"x": 1})
    first.finish("peers")

    second = Report(out, {**H200, "commit": "b"}, seconds=60)
    second.row("machine", "ceilings", lambda: {"x": 2})
    second.row("engine", "ours", lambda: {"x": 3})
    second.finish("engine")

    assert {key: row["x"] for key, row in found(out).items()} == {
        ("machine", "ceilings"): 2,
        ("peers", "theirs"): 1,
        ("engine", "ours"): 3,
    }
    commits = {run["number"]: run["conditions"]["commit"] for run in told(out)["runs"]}
    assert {key: commits[row["run"]] for key, row in found(out).items()} == {
        ("machine", "ceilings"): "b",
        ("peers", "theirs"): "a",
        ("engine", "ours"): "b",
    }
    assert all(run["date"] for run in told(out)["runs"])
    assert second.num_measured == 1


def test_a_stage_measured_anew_takes_the_place_of_what_there_was(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    first = Report(out, H200, seconds=60)
    for name in ("kept", "gone"):
        first.row("engine", name, lambda: {"x": 1, "is_right": False})
    first.row("peers", "theirs", lambda: {"x": 1})

    second = Report(out, H200, seconds=60)
    second.row("engine", "kept", lambda: {"x": 2})
    assert set(found(out)) == {("engine", "kept"), ("engine", "gone"), ("peers", "theirs")}
    second.finish("engine")

    assert {key: row["x"] for key, row in found(out).items()} == {
        ("peers", "theirs"): 1,
        ("engine", "kept"): 2,
    }
    assert second.is_right


def test_a_stage_cut_short_keeps_what_it_did_not_measure(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    first = Report(out, H200, seconds=60)
    for name in ("short", "long"):
        first.row("engine", name, lambda: {"x": 1})

    second = Report(out, H200, seconds=60)
    second.row("engine", "short", lambda: {"x": 2})
    second.row("engine", "long", lambda: {"x": 2}, needs_seconds=90)
    second.finish("engine")

    assert {key: row["x"] for key, row in found(out).items()} == {
        ("engine", "short"): 2,
        ("engine", "long"): 1,
    }
    assert [run["number"] for run in told(out)["runs"]] == [0, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param('{"runs": [{"num', "cannot be read", id="cut off"),
        pytest.param('{"conditions": {}, "rows": []}', "cannot be read", id="of another form"),
        pytest.param('{"runs": [], "rows": [{"name": "a"}]}', "none of a run's", id="rows of no run"),
        pytest.param(
            '{"runs": [{"number": 0, "conditions": {"device": "NVIDIA H100"}}], "rows": []}',
            "it is of NVIDIA H100, this is NVIDIA H200",
            id="of another GPU",
        ),
    ],
)
def test_a_file_that_cannot_be_added_to_is_set_aside(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    for number in (1, 2):
        out.write_text(text)
        Report(out, H200, seconds=60)

        assert (tmp_path / f"results.aside-{number}.json").read_text() == text
        assert told(out)["rows"] == []
        assert why in capsys.readouterr().out


def test_each_part_of_a_long_row_is_on_disk_at_once(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    report = Report(out, {}, seconds=60)
    seen = []

    def measure() -> Iterator[Row]:
        for count in (1, 2):
            yield {"count": count}
            seen.append(found(out)["checks", "long"])

    row = report.row("checks", "long", measure)

    assert [(one["count"], one["is_unfinished"]) for one in seen] == [(1, True), (2, True)]
    assert row is not None
    assert row["count"] == 2
    assert "is_unfinished" not in found(out)["checks", "long"]


def test_a_row_that_the_time_cuts_keeps_its_parts(tmp_path: Path) -> None:
    out, clock = tmp_path / "results.json", Clock()
    report = Report(out, {}, seconds=60, clock=clock)

    def measure() -> Iterator[Row]:
        for count in range(1, 10):
            report.check_time()
            clock.now += 25
            yield {"count": count}

    report.row("checks", "long", measure)

    row = found(out)["checks", "long"]
    assert (row["count"], row["is_unfinished"], row["seconds"]) == (3, True, 75)
    assert report.is_right


def test_a_row_that_says_nothing_before_its_end_is_left_out_where_the_time_cuts_it(tmp_path: Path) -> None:
    out, clock = tmp_path / "results.json", Clock()
    report = Report(out, {}, seconds=60, clock=clock)

    def measure() -> Row:
        clock.now += 61
        report.check_time()
        return {"x": 1}

    assert report.row("engine", "long", measure) is None
    assert told(out)["rows"] == []
    assert told(out)["runs"][0]["left_out"] == ["long"]
    assert report.num_measured == 0


def test_what_fails_outside_of_rows_is_a_row(tmp_path: Path) -> None:
    report = Report(tmp_path / "results.json", {}, seconds=60)

    report.fail("engine", ImportError("no module"))

    assert not report.is_right
    assert report.rows[0]["error"] == "ImportError: no module"


def test_a_device_that_works_no_more_ends_the_run_before_it_spoils_other_rows(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    first = Report(out, H200, seconds=60)
    for name in ("bad", "good"):
        first.row("kernels", name, lambda: {"x": 1})
    asked = []

    def works() -> bool:
        asked.append(True)
        return len(asked) < 2

    def fail() -> Row:
        raise RuntimeError("an illegal memory access was encountered")

    second = Report(out, H200, seconds=60, works=works)
    second.row("kernels", "right", lambda: {"is_right": True})
    second.row("kernels", "wrong", lambda: {"is_right": False})
    with pytest.raises(DeviceLost, match=r"kernels \| bad"):
        second.row("kernels", "bad", fail)
    second.finish("kernels")

    assert len(asked) == 2
    assert found(out)["kernels", "good"]["x"] == 1
    assert "illegal" in found(out)["kernels", "bad"]["error"]
    assert not second.is_right


def test_a_part_of_a_run_has_a_time_of_its_own(tmp_path: Path) -> None:
    clock = Clock()
    report = Report(tmp_path / "results.json", {}, seconds=60, clock=clock)
    with report.within(30):
        clock.now += 29
        report.check_time()
        clock.now += 1
        with pytest.raises(TimeUp):
            report.check_time()
        with report.within(500):
            assert report.seconds_left == 0
    assert report.seconds_left == 30


def test_wrong_tokens_are_told_from_rounded_ones() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    prompt = [1, 2, 3]
    token_ids = torch.tensor([prompt])
    with torch.inference_mode():
        best = int(model(token_ids).logits[0, -1].argmax())
        worst = int(model(token_ids).logits[0, -1].argmin())
    assert judge(model, [prompt], [[best]])["is_right"]
    assert not judge(model, [prompt], [[worst]])["is_right"]
