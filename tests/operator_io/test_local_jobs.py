"""Jobs as processes: what they leave behind, how often they are tried, and that none outlives its time."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway_operator.cluster.local_jobs import LocalJobs
from headway_operator.cluster.local_template import process_template
from headway_operator.state import Evaluation

NAME = "demo-quality-1a2b3c4d"
# Counts its starts in the file of the first argument, which is never seen half written; the second says what
# each start does.
SCRIPT = """
import json, os, pathlib, sys, time
starts, plan, result = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), pathlib.Path(sys.argv[3])
number = int(starts.read_text()) if starts.exists() else 0
written = starts.with_name("written")
written.write_text(str(number + 1))
os.replace(written, starts)
step = plan[min(number, len(plan) - 1)]
print(step.get("says", ""), flush=True)
if "leaves" in step:
    result.write_text(step["leaves"])
time.sleep(step.get("seconds", 0))
sys.exit(step.get("status", 0))
"""
Start = Callable[..., None]


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[LocalJobs]:
    for name in ("logs", "results"):
        (tmp_path / name).mkdir()
    made = LocalJobs(tmp_path / "logs", tmp_path / "results", lambda: None)
    yield made
    await made.close()


@pytest.fixture
def start(jobs: LocalJobs, tmp_path: Path) -> Start:
    """start(*steps, **fields of the Job's spec)."""

    def run(*steps: dict[str, Any], command: str = sys.executable, **spec: Any) -> None:
        arguments = ["-c", SCRIPT, str(tmp_path / "starts"), json.dumps(steps), "/dev/termination-log"]
        container = {"name": "runtime", "command": [command], "args": arguments}
        rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}
        manifest = {
            "kind": "Job",
            "metadata": {"name": NAME},
            "spec": {
                "backoffLimit": 2,
                "podFailurePolicy": {"rules": [rule]},
                "template": {"spec": {"containers": [container]}},
                **spec,
            },
        }
        jobs.start(manifest, process_template(manifest, {}))

    return run


def num_starts(tmp_path: Path) -> int:
    return int((tmp_path / "starts").read_text())


async def ended(jobs: LocalJobs, eventually: Any) -> Evaluation:
    def end() -> Evaluation | None:
        (one,) = jobs.evaluations
        return one if one.phase in ("ended", "timed_out") else None

    result: Evaluation = await eventually(end)
    return result


@pytest.mark.parametrize("status", [0, 1])
async def test_a_verdict_is_final_whichever_it_is(
    jobs: LocalJobs, start: Start, tmp_path: Path, eventually: Any, status: int
) -> None:
    start({"status": status, "leaves": "{}", "says": "done"})
    want = Evaluation(NAME, "ended", f"exited with status {status}; last line: done", "{}")
    assert await ended(jobs, eventually) == want
    assert num_starts(tmp_path) == 1


async def test_no_verdict_is_tried_again_and_the_last_attempt_counts(
    jobs: LocalJobs, start: Start, tmp_path: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_operator.cluster.local_jobs.FIRST_PAUSE_SECONDS", 0.01)
    start({"status": 2, "says": "no network", "leaves": "half"}, {"status": 2}, {"leaves": "{}"})
    assert await ended(jobs, eventually) == Evaluation(NAME, "ended", "exited with status 0", "{}")
    assert num_starts(tmp_path) == 3


async def test_it_is_given_up_after_as_many_attempts_as_it_says(
    jobs: LocalJobs, start: Start, tmp_path: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_operator.cluster.local_jobs.FIRST_PAUSE_SECONDS", 0.01)
    start({"status": 2, "says": "no network"})
    want = Evaluation(NAME, "ended", "exited with status 2; last line: no network")
    assert await ended(jobs, eventually) == want
    assert num_starts(tmp_path) == 3


async def test_it_is_killed_when_its_time_is_over(
    jobs: LocalJobs, start: Start, tmp_path: Path, eventually: Any, children: Any
) -> None:
    start({"seconds": 600}, activeDeadlineSeconds=0.5)
    assert await ended(jobs, eventually) == Evaluation(NAME, "timed_out")
    assert children() == []


async def test_one_that_is_removed_or_left_behind_is_killed(
    jobs: LocalJobs, start: Start, tmp_path: Path, eventually: Any, children: Any
) -> None:
    start({"seconds": 600})
    await eventually(lambda: (tmp_path / "starts").exists())
    start({"seconds": 0})  # the same name: it is left alone
    await eventually(lambda: [one.phase for one in jobs.evaluations] == ["running"])
    jobs.remove(NAME)
    assert jobs.evaluations == ()
    await eventually(lambda: children() == [])
    start({"seconds": 600})
    await eventually(lambda: num_starts(tmp_path) == 2)
    await jobs.close()
    assert children() == []


async def test_its_lifeline_ends_when_this_process_does(
    jobs: LocalJobs, start: Start, eventually: Any, children: Callable[[], list[psutil.Process]]
) -> None:
    start({"seconds": 600})
    (child,) = await eventually(children)
    command = child.cmdline()
    assert int(command[command.index("--lifeline-fd") + 1]) > 2


async def test_a_command_that_does_not_exist_is_named(jobs: LocalJobs, start: Start, eventually: Any) -> None:
    start({}, command="/nowhere/python", backoffLimit=0)
    (evaluation,) = [await ended(jobs, eventually)]
    assert "cannot run '/nowhere/python'" in evaluation.message
