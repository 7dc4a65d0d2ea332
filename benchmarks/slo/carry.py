"""Results carried over a change that alters none of them: `make bench-slo BENCH_SLO="--carry REVISION"`.

A change that is meant to alter no outcome alters fingerprints all the same. What the code of REVISION found
is then held against what today's finds, on samples: of each load what Headway does in it without a fault, of
each kind of runs, each fault and each baseline the quickest; and on what both have found already. Simulations
hang on no clock, and the least difference in one of their thousands of requests shows in what they measure.
Where none differs, all that was found holds for today's code as well; where one does, nothing of it.
"""

import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.slo import store
from benchmarks.slo.plan import Plan, Task, tasks
from benchmarks.slo.work import Row

Simulate = Callable[[list[Task]], Iterable[tuple[Task, list[Row]]]]


class CarryError(Exception):
    """Nothing was carried over; says why."""


def over(plan: Plan, files: Mapping[str, Path], lines: Path, revision: str, simulate: Simulate) -> list[Task]:
    """Write what is known of a git revision under today's fingerprints, too; returns of which tasks.

    Raises CarryError where a sample differs, or there is no such revision.
    """
    known, today = store.read(lines), store.Fingerprints(plan, files)
    with tempfile.TemporaryDirectory() as folder:
        _check_out(revision, Path(folder))
        before = store.Fingerprints(plan, files, Path(folder))
    of_then = {task: known[before.of(task)] for task in tasks(plan) if before.of(task) in known}
    if not of_then:
        raise CarryError(f"--carry={revision!r}: {lines} has nothing of that revision's code")
    found = {task: rows for task, rows in of_then.items() if today.of(task) not in known}
    again = {task: known[today.of(task)] for task in of_then if task not in found}
    again |= simulate(samples(found))
    if differing := [task.words for task, rows in again.items() if _told(rows) != _told(of_then[task])]:
        raise CarryError(
            f"--carry={revision!r}: nothing is carried over, since today's code finds otherwise: "
            f"{'; '.join(differing)}. Run without --carry to simulate all of it again"
        )
    for task, rows in found.items():
        store.add(lines, today.of(task), again.get(task, rows))
    return list(found)


def samples(found: Mapping[Task, list[Row]]) -> list[Task]:
    """Of each load a run of Headway's; of each kind, each fault and each baseline the quickest."""
    chosen: dict[tuple[str, str], Task] = {}
    for task in sorted(found, key=lambda one: _seconds(found[one])):
        # Of Headway the names of faults, of baselines their own. All oracles are one code's.
        chosen.setdefault((task.kind, "" if task.kind == "oracle" else task.name), task)
        if task.kind == "headway" and not task.name:
            chosen.setdefault(("load", task.load), task)
    return list(dict.fromkeys(chosen.values()))


def _seconds(rows: Iterable[Row]) -> float:
    return sum(float(row["processor_seconds"]) for row in rows)


def _told(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """As it would be read again, but for where it was found and how long it took."""
    read = json.loads(json.dumps(list(rows)))
    apart = ("processor_seconds", "machine")
    return [{name: value for name, value in row.items() if name not in apart} for row in read]


def _check_out(revision: str, folder: Path) -> None:
    """What is fingerprinted of a revision."""
    command = ["git", "-C", str(store.ROOT), "archive", revision, "operator", "runtime", "benchmarks/slo"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise CarryError(f"--carry={revision!r} cannot be checked out: {why}") from error
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
