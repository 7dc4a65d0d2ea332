"""Runs the tests of what a GPU would do in one process, whose Triton interprets."""

from pathlib import Path

import pytest
from tests.interpreted import TIMEOUT_SECONDS, run_interpreted

pytestmark = pytest.mark.long


@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
def test_gpu_layers_never_make_the_host_wait() -> None:
    run_interpreted(Path(__file__).with_name("interpreted"), HEADWAY_KERNELS="triton")
