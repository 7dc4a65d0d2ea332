"""What tests of every package share."""

from collections.abc import Callable

import psutil
import pytest


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """Lists the processes that descend from this one and were started since the test began."""
    this = psutil.Process()
    before = set(this.children(recursive=True))
    return lambda: [child for child in this.children(recursive=True) if child not in before]
