"""What the evaluation leaves behind is what the operator reads, whatever and however much it measured."""

import json
import math
from typing import Any

import pytest

from headway_eval.verdict_file import MAX_BYTES, encode
from headway_operator.quality.verdict_wire import read_verdict


def verdict(num_suites: int, *, passed: bool = False, value: float = 12.5, name: str = "x.jsonl") -> Any:
    checks = [
        {
            "name": f"accuracy drop, {number} {name}",
            "value": value,
            "limit": 2.0,
            "unit": "points",
            "passed": passed or number % 2 == 1,
            "note": "not chance (p=1e-06): 20 lost, 1 won",
        }
        for number in range(num_suites)
    ]
    tasks = [
        {"name": f"{number} {name}", "tasks": 100, "right": 70, "baseline_right": 90, "lost": 25, "won": 5}
        for number in range(num_suites)
    ]
    text = {
        "name": "a.txt",
        "tokens": 6704,
        "perplexity": 2.9011534,
        "baseline_perplexity": math.inf,
        "mean_kl": value,
        "p99_kl": 0.1,
        "same_choice_share": 0.5,
    }
    return {
        "schema_version": 1,
        "passed": passed,
        "checks": checks,
        "text": text,
        "tasks": tasks,
        "left_out": 0,
    }


def test_all_numbers_arrive() -> None:
    read = read_verdict(encode(verdict(2)).decode())
    assert read is not None
    assert not read.passed
    assert [(one.name, one.value, one.passed) for one in read.checks] == [
        ("accuracy drop, 0 x.jsonl", 12.5, False),
        ("accuracy drop, 1 x.jsonl", 12.5, True),
    ]
    assert read.checks[0].note == "not chance (p=1e-06): 20 lost, 1 won"
    assert read.text is not None
    assert (read.text.perplexity, read.text.baseline_perplexity) == (2.90115, None)
    assert (read.text.mean_kl, read.text.p99_kl, read.text.same_choice_share) == (12.5, 0.1, 0.5)
    assert [(one.tasks, one.baseline_right, one.lost, one.won) for one in read.tasks] == [
        (100, 90, 25, 5)
    ] * 2
    assert read.left_out == 0


def test_a_number_that_is_not_finite_is_absent() -> None:
    read = read_verdict(encode(verdict(1, value=math.nan)).decode())
    assert read is not None
    assert read.text is not None
    assert (read.checks[0].value, read.checks[0].limit, read.text.mean_kl) == (None, 2.0, None)


@pytest.mark.parametrize("num_suites", [8, 12, 16, 24, 100])
@pytest.mark.parametrize("name", ["x.jsonl", "ключ" * 9])
def test_it_always_fits_and_keeps_the_verdict_and_what_failed(num_suites: int, name: str) -> None:
    line = encode(verdict(num_suites, name=name))
    assert len(line) <= MAX_BYTES
    read = read_verdict(line.decode())
    assert read is not None
    assert not read.passed
    assert not read.checks[0].passed
    assert len(read.checks) + read.left_out == num_suites
    if read.left_out:
        assert all(not check.passed for check in read.checks)
        assert len(line) > MAX_BYTES / 2  # no more was left out than had to be


def test_eight_files_leave_out_nothing_but_notes() -> None:
    """As many as spec.quality takes, with long names."""
    read = read_verdict(encode(verdict(8, name="a-rather-long-name-of-a-file.jsonl")).decode())
    assert read is not None
    assert (len(read.checks), len(read.tasks), read.left_out) == (8, 8, 0)


@pytest.mark.parametrize("output", ["", "headway eval: could not judge: no", "{}", "[1]", "null", "\ufffd"])
def test_other_last_words_are_no_verdict(output: str) -> None:
    assert read_verdict(output) is None


def test_a_later_version_is_no_verdict_that_is_understood() -> None:
    assert read_verdict(json.dumps({**verdict(1), "schema_version": 2})) is None
