"""Runs the tests of recorded steps, each file in a process whose Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).with_name("numbers").glob("test_*.py"))
# The longest takes three minutes of a slow core that is its own; a hang is all that this is to end.
TIMEOUT_SECONDS = 560


@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
@pytest.mark.parametrize("file", FILES, ids=[file.stem.removeprefix("test_") for file in FILES])
def test_recorded_steps_do_what_plain_ones_do(file: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HEADWAY_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    # 5: nothing was collected.
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
