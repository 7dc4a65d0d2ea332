"""A CPU that stands for a GPU, for `--smoke`: kernels are interpreted, counted, and recorded as tests record.

Triton and layers read what they go by once, so `interpret` comes before anything imports either.
"""

import os
from typing import Any

# Of kernels, in recordings that are replayed too.
_num_launches = 0


def interpret() -> None:
    """All kernels are Triton's, and run on the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["HEADWAY_KERNELS"] = "triton"


def stand_in() -> None:
    """Have launches counted, and decode steps recorded."""
    from benchmarks.gpu.fast_interpreter import hasten
    from triton.runtime.interpreter import GridExecutor

    from headway_runtime.graphs import opening
    from headway_runtime.graphs.recording import Recorder

    hasten()
    launch = GridExecutor.__call__

    def counted(executor: Any, *args: object, **kwargs: object) -> object:
        global _num_launches
        _num_launches += 1
        return launch(executor, *args, **kwargs)

    GridExecutor.__call__ = counted
    opening.make_capturer = lambda device: Recorder()


def num_launches() -> int:
    """So far; 0 for ever where nothing stands in."""
    return _num_launches
