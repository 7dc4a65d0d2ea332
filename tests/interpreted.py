"""Runs tests in a process whose Triton interprets, as Triton decides that when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

# A slow core takes half of it; each test of the process has its own, shorter time.
TIMEOUT_SECONDS = 1200


def run_interpreted(folder: Path, **environment: str) -> None:
    """Fails with what pytest printed, and where nothing was collected."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
