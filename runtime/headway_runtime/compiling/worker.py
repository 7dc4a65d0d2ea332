"""The process that compiles an engine's kernels while another one loads its weights.

Its standard input is a pickled `CompileOrder`, by the process that started it; what it did is one line of
JSON on its standard output. It notes what the steps of a start launch, then forks into as many processes as
it was told, so that what was noted need not be told again; each compiles one kernel after the other, the
longest first. It must see no GPU: whoever has started CUDA cannot fork.
"""

import json
import logging
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Sequence
from functools import partial

import triton
from triton.backends.compiler import GPUTarget

from headway_runtime.compiling.imagined_steps import launch_steps
from headway_runtime.compiling.noted_launches import (
    NotedLaunch,
    build_launcher,
    compile_launch,
    noted_launches,
    target_of,
)
from headway_runtime.compiling.order import CompileOrder
from headway_runtime.lifeline import die_with_parent

# What forked processes find in their memory.
_noted: Sequence[NotedLaunch] = ()


def compile_order(order: CompileOrder) -> dict[str, object]:
    """What was done: how many kernels there are, which failed and why, and seconds."""
    global _noted
    began_at = time.monotonic()
    found = noted_launches(order.gpu, lambda: launch_steps(order.config, order.share))
    _noted = sorted(found, key=lambda one: -one.num_characters)
    noted_at = time.monotonic()
    failed: dict[str, str] = {}
    if _noted:
        context = multiprocessing.get_context("fork")
        count = min(order.num_processes, len(_noted))
        with context.Pool(count, die_with_parent, (os.getpid(),)) as pool:
            compile_one = partial(_compile, target_of(order.gpu))
            done = pool.imap_unordered(compile_one, range(len(_noted)))
            failed = {name: problem for name, problem in done if problem is not None}
    if not failed:
        order.done()
    return {
        "num_kernels": len(_noted),
        "failed": failed,
        "noting_seconds": round(noted_at - began_at, 3),
        "compiling_seconds": round(time.monotonic() - noted_at, 3),
    }


def _compile(target: GPUTarget, number: int) -> tuple[str, str | None]:
    """The kernel's name, and what went wrong."""
    launch = _noted[number]
    try:
        build_launcher(compile_launch(launch, target))
    except Exception as error:  # noqa: BLE001 - whatever Triton's compiler raises, whoever launches it meets it
        return launch.name, f"{type(error).__name__}: {error}"
    return launch.name, None


def main() -> int:
    order: CompileOrder = pickle.load(sys.stdin.buffer)
    die_with_parent(order.parent_pid)
    # What is wrong with the model is told by who loads it.
    logging.disable(logging.CRITICAL)
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set: there is nothing to compile")
    print(json.dumps(compile_order(order)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
