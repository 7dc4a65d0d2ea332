"""Intervals worked out in several processes: which do it, and what becomes of them when it ends otherwise."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway_simulator.errors import SimulatorError
from headway_simulator.table_processes import beside, tables_of


@dataclass(frozen=True)
class Search:
    """folder: gets a file for each interval that is begun, which says by whom. broken, killed: the interval
    that cannot be worked out, and the one whose process is killed."""

    folder: Path
    num_intervals: int = 40
    broken: int | None = None
    killed: int | None = None
    seconds: float = 0.01

    def misses(self, index: int) -> dict[int, int]:
        (self.folder / str(index)).write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(self.seconds)
        if index == self.broken:
            raise ValueError(f"interval {index}")
        if index == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return {1: index}

    @property
    def processes(self) -> set[int]:
        return {int(one.read_text(encoding="utf-8") or 0) for one in self.folder.iterdir()} - {0}


def test_all_are_worked_out_in_order_and_by_several(tmp_path: Path) -> None:
    search = Search(tmp_path)
    assert list(tables_of(search, 2)) == [{1: index} for index in range(40)]
    assert len(search.processes) == 2
    assert os.getpid() not in search.processes


def test_of_one_process_it_is_ones_own(tmp_path: Path) -> None:
    search = Search(tmp_path)
    assert list(tables_of(search, 1)) == [{1: index} for index in range(40)]
    assert search.processes == {os.getpid()}


def test_an_interval_that_cannot_be_worked_out_ends_all(tmp_path: Path) -> None:
    search = Search(tmp_path, broken=1, seconds=0.2)
    with pytest.raises(ValueError, match="interval 1"):
        list(tables_of(search, 2))
    assert len(list(tmp_path.iterdir())) < search.num_intervals
    eventually(lambda: not any(map(is_alive, search.processes)))


def test_a_process_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match=r"was killed, .* remedy: a lower --jobs, or --no-oracle"):
        list(tables_of(Search(tmp_path, killed=1), 2))


def begun(search: Search) -> dict[int, int]:
    return search.misses(7)


def test_one_is_worked_out_beside_what_one_does_oneself(tmp_path: Path) -> None:
    search = Search(tmp_path)
    with beside(search, begun) as found:
        eventually(lambda: len(search.processes) == 1)
        assert os.getpid() not in search.processes
        assert found() == {1: 7}
    eventually(lambda: not any(map(is_alive, search.processes)))


def test_what_nobody_waits_for_ends(tmp_path: Path) -> None:
    search = Search(tmp_path, seconds=3600.0)
    with beside(search, begun):
        eventually(lambda: len(search.processes) == 1)
    assert not any(map(is_alive, search.processes))


def test_one_that_was_killed_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="a process that looks for the oracle was killed"):
        with beside(Search(tmp_path, killed=7), begun) as found:
            found()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_nobody_outlives_who_began_them(tmp_path: Path, how: signal.Signals) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.simulator.test_table_processes import Search; "
        "from headway_simulator.table_processes import tables_of; "
        "list(tables_of(Search(Path(sys.argv[1]), seconds=3600.0), 2))"
    )
    # A group of its own, as a terminal makes it: it interrupts all of it.
    command = [sys.executable, "-c", code, str(tmp_path)]
    began = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    search = Search(tmp_path)
    try:
        eventually(lambda: len(search.processes) == 2)
        if how == signal.SIGINT:
            os.killpg(began.pid, how)
        else:
            began.send_signal(how)
        assert began.wait(timeout=60.0) != 0
        eventually(lambda: not any(map(is_alive, search.processes)))
    finally:
        began.kill()


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
