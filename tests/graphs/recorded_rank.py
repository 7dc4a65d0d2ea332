"""A rank whose steps are recorded by `Recorder`, exchanges with other ranks included."""

import os
import sys

from benchmarks.gpu.fast_interpreter import hasten

from headway_runtime.graphs import opening
from headway_runtime.graphs.recording import RecordedCollectives, Recorder
from headway_runtime.parallel import tensor_group, worker


def record_here(recorder: Recorder) -> None:
    """Have engines of this process record with it."""
    gloo = tensor_group._gloo
    opening.make_capturer = lambda device: recorder
    tensor_group._gloo = lambda *asked: RecordedCollectives(gloo(*asked), recorder)


if __name__ == "__main__":
    hasten()
    record_here(Recorder())
    status = worker.main()
    sys.stderr.flush()
    os._exit(status)
