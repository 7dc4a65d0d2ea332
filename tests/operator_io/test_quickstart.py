"""`make quickstart` when it is told to stop before its end."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


def test_told_to_stop_it_leaves_no_process_and_nothing_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "e2e.quickstart"]
    errors = tmp_path / "errors"
    with (
        errors.open("w") as told,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=told, text=True) as quickstart,
    ):
        assert quickstart.stdout is not None
        lines = iter(quickstart.stdout.readline, "")
        assert any(line.startswith("load:") for line in lines), "users ask from here on"
        family = psutil.Process(quickstart.pid).children(recursive=True)
        try:
            quickstart.send_signal(signal.SIGTERM)
            assert quickstart.wait(30) == 128 + signal.SIGTERM
            _, alive = psutil.wait_procs(family, timeout=10)
            assert (len(family) > 2, alive) == (True, [])
            assert "Unclosed" not in errors.read_text()
        finally:
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
