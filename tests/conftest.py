"""What tests of every package share."""

import sys
from collections.abc import Callable

import psutil
import pytest


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """Lists the processes that descend from this one and were started since the test began."""
    this = psutil.Process()
    before = set(this.children(recursive=True))
    return lambda: [child for child in this.children(recursive=True) if child not in before]


@pytest.fixture
def tape_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls of each tape of CPU kernels that is run. On Linux there must be such kernels."""
    if sys.platform != "linux":
        pytest.skip("CPU kernels of our own want Linux")
    from headway_runtime.kernels.cpu.tape import Tape

    found: list[int] = []
    run = Tape.run

    def counted(tape: Tape) -> None:
        found.append(tape.num_calls)
        run(tape)

    monkeypatch.setattr(Tape, "run", counted)
    return found
