"""The benchmark of the levers: what its questions are, what its page says, and a short run of it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.levers.page import BEGIN, END, render_page
from benchmarks.levers.points import Point
from benchmarks.levers.questions import QUESTIONS_PER_OWN_DOCUMENT, Questions
from benchmarks.levers.rows import CPU, GPU, Asking, Sizes, rows
from benchmarks.levers.run import Study

from headway_bench.tokenizer import LocalTokenizer
from headway_runtime.sources import resolve

GUESSES = json.dumps({"method": "ngram"})
SMALL = replace(
    CPU,
    prefix_tokens=200,
    answer_tokens=4,
    uncapped_tokens=(4, 12),
    target_users=2,
    users=(1, 2),
    ttft_milliseconds=60_000.0,
    itl_milliseconds=60_000.0,
    kv_cache_memory="8Mi",
    chunk_sizes=(64,),
)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("bundled://headway-tiny")


def asked(asking: Asking, model: Path, count: int = 40) -> list[str]:
    questions = Questions(SMALL, asking, 1, LocalTokenizer(model).count)
    return [questions.question(number).prompt for number in range(count)]


@pytest.mark.parametrize("sizes", [CPU, GPU])
def test_each_row_adds_one_lever_and_keeps_the_others(sizes: Sizes) -> None:
    every = rows(sizes, GUESSES)
    assert len({row.name for row in every}) == len(every) == 8
    for before, after in itertools.pairwise(every):
        changed = [
            before.flags.get(name) != after.flags.get(name) for name in {**before.flags, **after.flags}
        ]
        is_asked_otherwise = before.asking != after.asking
        assert sum(changed) <= 1
        assert any(changed) or is_asked_otherwise
    assert every[-1].asking == Asking(is_streamed=True, is_static_first=True, is_capped=True)
    assert "--no-enable-prefix-caching" not in every[-1].flags


def test_most_prompts_begin_alike_only_where_the_static_part_stands_first(model: Path) -> None:
    beginnings = [prompt[:200] for prompt in asked(Asking(is_static_first=True), model)]
    most = max(beginnings.count(one) for one in beginnings)
    assert most == len(beginnings) * (QUESTIONS_PER_OWN_DOCUMENT - 1) // QUESTIONS_PER_OWN_DOCUMENT
    others = [prompt[:200] for prompt in asked(Asking(), model)]
    assert len(set(others)) == len(others)


def test_questions_are_the_same_every_time_and_of_the_lengths_asked(model: Path) -> None:
    assert asked(Asking(), model) == asked(Asking(), model)
    # Of another run all is new but the document that is shared.
    count = LocalTokenizer(model).count
    one, other = (Questions(SMALL, Asking(is_static_first=True), run, count).question(7) for run in (1, 2))
    assert one.prompt[:200] == other.prompt[:200]
    assert one.prompt != other.prompt
    assert one.output_tokens == other.output_tokens
    questions = Questions(SMALL, Asking(), 1, LocalTokenizer(model).count)
    lengths = {questions.question(number).output_tokens for number in range(60)}
    assert (min(lengths), max(lengths)) == SMALL.uncapped_tokens
    capped = Questions(SMALL, Asking(is_capped=True), 1, LocalTokenizer(model).count)
    assert {capped.question(number).output_tokens for number in range(9)} == {SMALL.answer_tokens}
    right = questions.question(3).answer
    assert questions.is_right(3, f" {right}, and more")
    assert not questions.is_right(3, f"not {right}")


def test_a_row_is_climbed_to_the_most_users_within_the_slo(model: Path, tmp_path: Path) -> None:
    every = rows(SMALL, GUESSES)
    study = Study(SMALL, str(model), "cpu", is_quick=False, log_file=tmp_path / "log")
    found = study.ladder([every[0], every[-1]])
    assert [(row["name"], row["users_within_slo"]) for row in found] == [
        (every[0].name, 2),
        (every[-1].name, 2),
    ]
    assert [len(row["points"]) for row in found] == [1, 1]
    whole, streamed = study.points
    assert (whole.row, whole.users, whole.num_failed, whole.itl) == (every[0].name, 2, 0, None)
    assert whole.ttft == whole.e2e
    assert whole.cached_share == 0
    assert streamed.itl is not None
    # Not of each request: on a busy machine all of a short answer may come as one event.
    assert 0 < streamed.ttft.p50 <= streamed.e2e.p50
    assert streamed.ttft != streamed.e2e
    assert streamed.cached_share > 0.4
    # Documents of 200 tokens are no task for it; it was found in bfloat16, too.
    assert min(whole.right_share, streamed.right_share) > 0.8


def test_a_row_that_misses_the_slo_is_tried_with_fewer_users(model: Path, tmp_path: Path) -> None:
    hopeless = replace(SMALL, ttft_milliseconds=0.001)
    study = Study(hopeless, str(model), "cpu", is_quick=False, log_file=tmp_path / "log")
    (row, *_) = rows(hopeless, GUESSES)
    (found,) = study.ladder([row])
    assert found["users_within_slo"] == 0
    assert [point.users for point in study.points] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("runs", "want", "tried"),
    [
        pytest.param("+++++", 4, [2, 3, 4], id="every first run is in time"),
        pytest.param("+-++-++", 4, [2, 3, 3, 3, 4, 4, 4], id="one miss of three is noise"),
        pytest.param("+-+-", 2, [2, 3, 3, 3], id="two misses of three are not"),
        pytest.param("+--", 2, [2, 3, 3], id="after two misses no third run"),
        pytest.param("--+", 1, [2, 2, 1], id="fewer, where the target is too many"),
        pytest.param("---+-", 0, [2, 2, 1, 1, 1], id="none"),
    ],
)
def test_a_climb_ends_when_two_of_three_runs_miss(
    runs: str, want: int, tried: list[int], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = replace(SMALL, users=(1, 2, 3, 4))
    study = Study(sizes, str(model), "cpu", is_quick=False, log_file=tmp_path / "log")
    left, asked_for = iter(runs), []

    class Run:
        def __init__(self, users: int) -> None:
            asked_for.append(users)

        def is_within(self, sizes: Sizes) -> bool:
            return next(left) == "+"

    monkeypatch.setattr(study, "_measure", lambda url, row, users: Run(users))
    assert study._climb("", rows(sizes, GUESSES)[0]) == want
    assert asked_for == tried


def test_the_page_shows_the_middle_run_of_the_target(tmp_path: Path) -> None:
    page = tmp_path / "levers.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    found = made_up()
    row = found["ladder"]["rows"][-1]
    (point,) = row["points"]
    row["points"] = [
        point | {"ttft": {"p50": 1.0, "p95": p95, "p99": 9_999.0}} for p95 in (7_777.0, 5_555.0, 6_666.0)
    ]
    render_page(found, CPU, page)
    assert "| 1 / 6,666 |" in page.read_text(encoding="utf-8")


def test_the_page_gets_what_was_found_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "levers.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    render_page(made_up(), CPU, page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    for row in rows(CPU, GUESSES):
        assert f"| {row.name} |" in text
    assert "| 8 | 100 | 120 | 1.20 (0.90, 1.20, 1.50) | 20 | 20 |" in text
    assert "90%, 100%" in text
    assert (tmp_path / "levers.svg").read_text(encoding="utf-8").startswith("<?xml")
    only_recall = {"recall": made_up()["recall"]}
    render_page(only_recall, CPU, page)
    assert "Speculation by users" not in page.read_text(encoding="utf-8")
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"levers\.md.*marks"):
        render_page(made_up(), CPU, page)


def made_up() -> dict[str, Any]:
    """Results of the shape that a run has."""

    def point(row: str, rate: float = 100.0) -> dict[str, Any]:
        latency = {"p50": 20.0, "p95": 30.0, "p99": 40.0}
        fields = dict.fromkeys(Point.__slots__, 1)
        return fields | {
            "row": row,
            "users": CPU.target_users,
            "ttft": latency,
            "itl": None if row == "baseline" else latency,
            "e2e": latency,
            "output_tokens_per_second": rate,
        }

    conditions = {
        "commit": "abc",
        "processor": "any",
        "cpus": 2,
        "device": "cpu",
        "model": "tiny",
        "load_average_before": 0.0,
        "seconds": 60.0,
    }
    speculating = [{"without": point("a"), "with": point("b", rate)} for rate in (90.0, 150.0, 120.0)]
    share = {"right": 0.9, "same": 1.0}
    parts: dict[str, list[dict[str, Any]]] = {
        "ladder": [
            {"name": row.name, "users_within_slo": 8, "points": [point(row.name)]}
            for row in rows(CPU, GUESSES)
        ],
        "chunks": [{"tokens": 64, **point("64")}],
        "speculation": [{"users": 8, "rounds": speculating}],
        "recall": [{"task": "recall", "context": 1000, "count": 10, "bfloat16": share, "int8": share}],
    }
    return {name: {"conditions": conditions, "rows": found} for name, found in parts.items()}
