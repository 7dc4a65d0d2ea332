import signal
from pathlib import Path

import pytest

from headway_operator.cluster.local_exit import count_oom_kills, explain_exit, log_tail


@pytest.mark.parametrize(
    ("returncode", "killed_for", "oom_kills", "last_line", "want"),
    [
        (1, "", 0, "boom", ("CrashLoopBackOff", "exited with status 1; last line: boom")),
        (0, "", 1, "", ("CrashLoopBackOff", "exited with status 0")),
        (-signal.SIGSEGV, "", 1, "", ("CrashLoopBackOff", "ended by SIGSEGV")),
        (-signal.SIGKILL, "", 0, "", ("CrashLoopBackOff", "ended by SIGKILL")),
        (-signal.SIGKILL, "", 1, "", ("OOMKilled", "killed because memory ran out")),
        (-signal.SIGKILL, "not ready", 1, "", ("StartupProbeFailed", "killed because it was not ready")),
        (
            -signal.SIGKILL,
            "/health failed",
            1,
            "",
            ("LivenessProbeFailed", "killed because it was /health failed"),
        ),
        (4, "", 0, "16 GiB", ("DoesNotFit", "the memory cannot hold the model; last line: 16 GiB")),
        (3, "", 0, "404", ("ModelFetchFailed", "the model could not be fetched; last line: 404")),
    ],
    ids=[
        "status",
        "status-0",
        "segfault",
        "killed",
        "out-of-memory",
        "by-its-supervisor",
        "not-alive",
        "does-not-fit",
        "fetch",
    ],
)
def test_an_end_is_told_by_its_cause(
    returncode: int, killed_for: str, oom_kills: int, last_line: str, want: tuple[str, str]
) -> None:
    assert explain_exit(returncode, killed_for, oom_kills, last_line) == want


def test_the_tail_skips_blank_lines_and_what_came_before(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log, 0, 5) == ""
    log.write_bytes(b"before\n" + b"one\n\n  \ntwo \xff\nthree\n\n")
    assert log_tail(log, 7, 2) == "two \ufffd\nthree"
    assert log_tail(log, 7, 9) == "one\ntwo \ufffd\nthree"


def test_the_kernels_count_of_memory_kills_is_a_number() -> None:
    assert count_oom_kills() >= 0
