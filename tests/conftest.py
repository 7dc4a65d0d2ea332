"""What tests of every package share."""

import signal
import sys
from collections.abc import Callable

import psutil
import pytest


def pytest_configure() -> None:
    """A shell has what it puts into the background ignore SIGINT, and children inherit that: those of tests
    that interrupt them would go on for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that are marked `long` come first."""
    long = {item.path for item in items if item.get_closest_marker("long") is not None}
    items.sort(key=lambda item: item.path not in long)


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
