"""The lifeline: silent while the parent lives, at once when it is gone."""

import os
import subprocess
import sys

WATCHER = """
import sys, time
from headway_runtime.lifeline import watch_lifeline
watch_lifeline(int(sys.argv[1]))
time.sleep(0.3)
print("watching", flush=True)
time.sleep(60)
"""


def test_a_pipe_that_another_reader_made_non_blocking_ends_only_with_its_writer() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)  # the flag belongs to the pipe's open file, which children share
    with subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(read_end)],
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        os.write(write_end, b"not the end")
        assert process.stdout is not None
        assert process.stdout.readline() == b"watching\n", "it took silence for the end"
        assert not os.get_blocking(read_end), "it changed the pipe under the others"
        os.close(write_end)
        _, errors = process.communicate(timeout=10)
    os.close(read_end)
    assert process.returncode == 1
    assert b"its parent is gone" in errors
