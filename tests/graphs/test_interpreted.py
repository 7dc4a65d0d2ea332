"""Runs the tests of recorded steps in one process, whose Triton interprets."""

from pathlib import Path

import pytest
from tests.interpreted import TIMEOUT_SECONDS, run_interpreted

pytestmark = pytest.mark.long


@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
def test_recorded_steps_do_what_plain_ones_do() -> None:
    run_interpreted(Path(__file__).with_name("numbers"), HEADWAY_KERNELS="triton")
