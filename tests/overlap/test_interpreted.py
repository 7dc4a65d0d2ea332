"""Runs the tests of what a GPU would do in a process whose Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_SECONDS = 280


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_hidden_waits.py", "no_layer or measured"),
        ("test_hidden_waits.py", "not (no_layer or measured)"),
        ("test_recorded.py", ""),
    ],
)
def test_gpu_layers_never_make_the_host_wait(file: str, chosen: str) -> None:
    path = Path(__file__).with_name("interpreted") / file
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "HEADWAY_KERNELS": "triton",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), "-k", chosen]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    # 5: nothing was collected.
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
