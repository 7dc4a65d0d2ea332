"""Runs the tests of the kernels' numbers in one process, whose Triton interprets."""

from pathlib import Path

import pytest
from tests.interpreted import TIMEOUT_SECONDS, run_interpreted

pytestmark = pytest.mark.long


@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
def test_kernels_compute_what_their_references_do() -> None:
    run_interpreted(Path(__file__).with_name("numbers"))
