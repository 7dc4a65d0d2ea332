"""A little of the soak that `make soak` runs for minutes (benchmarks/soak/)."""

import asyncio

from benchmarks.soak import run


def test_random_traffic_leaves_nothing_behind() -> None:
    with run.running_server() as server:
        outcome = asyncio.run(run.soak(server, seconds=12.0, seed=20, num_users=16, num_requests=200))
    assert not outcome.problems, run.report(outcome)
    received = outcome.books.counters["received"]
    want = f"0 blocks in use, 0 running, 0 waiting; received {received} = ended {received}"
    assert want in run.report(outcome)


def test_a_fault_is_seen_and_named() -> None:
    with run.running_server(["--api-key=another"]) as server:
        outcome = asyncio.run(run.soak(server, seconds=1.0, seed=21, num_users=2))
    assert any("401" in problem for problem in outcome.problems)
    assert "PROBLEM" in run.report(outcome)


def test_a_traceback_in_a_log_is_told_from_the_word() -> None:
    asked = 'INFO headway.access {"path":"/v1/models/Traceback"}\n'
    assert run.tracebacks(asked) == ""
    shown = "Traceback (most recent call last):\n  File x\nValueError: no\n"
    assert run.tracebacks(asked + shown) == shown
    assert run.tracebacks(shown) == shown
    assert run.tracebacks("x\n  + Exception Group Traceback (most recent call last):\n").startswith("  + Exc")
