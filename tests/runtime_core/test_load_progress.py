"""While weights are read: a bar for who watches a terminal, a few log lines for everybody else."""

import logging
import os
import pty
import subprocess
import sys
import termios

import pytest

from headway_runtime.load_progress import LOG_INTERVAL_SECONDS, LoadProgress
from headway_runtime.sources import resolve

READ_ALL = """
import logging, sys
from pathlib import Path
import torch
from safetensors import safe_open
from headway_runtime.models.loader import CheckpointWeights
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
folder = Path(sys.argv[1])
weights = CheckpointWeights(folder, torch.float32, torch.device("cpu"))
with safe_open(folder / "model.safetensors", framework="pt") as opened:
    shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
for name, shape in shapes.items():
    weights.take(name, shape)
weights.finish()
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_log_lines_come_every_few_seconds_and_say_bytes_and_files(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = LoadProgress(10_000_000_000, 2, has_terminal=False, clock=clock)
    for tensor in range(100):
        clock.now += LOG_INTERVAL_SECONDS / 20
        progress.tensor_read(100_000_000)
        if tensor == 49:
            progress.file_read()
    progress.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "reading weights: 2.00 of 10.00 GB, 0 of 2 files",
        "reading weights: 4.00 of 10.00 GB, 0 of 2 files",
        "reading weights: 6.00 of 10.00 GB, 1 of 2 files",
        "reading weights: 8.00 of 10.00 GB, 1 of 2 files",
        "reading weights: 10.00 of 10.00 GB, 1 of 2 files",
        "read 10.000 GB of weights from 2 files in 25.00 s",
    ]


def test_a_model_that_loads_at_once_takes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = LoadProgress(1000, 1, has_terminal=False, clock=Clock())
    progress.tensor_read(2000)  # a file's header is no tensor, and sizes may differ by it
    progress.file_read()
    progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "read 0.000 GB of weights from 1 file in 0.00 s"
    ]


def test_a_terminal_sees_a_bar_of_a_real_checkpoint() -> None:
    folder = resolve("bundled://headway-tiny")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    try:
        done = subprocess.run([sys.executable, "-c", READ_ALL, str(folder)], stderr=theirs, timeout=120)
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            seen += part
    finally:
        os.close(ours)
    assert done.returncode == 0, seen
    assert b"Reading weights:   0%" in seen
    assert b"100%" in seen
    assert b"file 1 of 1" in seen


def test_a_pipe_sees_lines_and_no_bar() -> None:
    folder = resolve("bundled://headway-tiny")
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "of weights from 1 file in" in done.stderr
    assert "\r" not in done.stderr
