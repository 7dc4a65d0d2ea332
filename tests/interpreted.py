"""Runs tests in a process whose Triton interprets, as Triton decides that when it is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A slow core takes half of it; each test of the process has its own, shorter time.
TIMEOUT_SECONDS = 1200


def run_interpreted(folder: Path, **environment: str) -> None:
    """Fails with what pytest printed, and where nothing of some file was collected."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(folder)],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not done after {TIMEOUT_SECONDS} s: {(error.stdout or b'')[-20000:]!r}")
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    ran = set(re.findall(r"(test_\w+\.py)::", done.stdout))
    assert {file.name for file in folder.glob("test_*.py")} <= ran
