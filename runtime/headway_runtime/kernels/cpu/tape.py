"""Many calls of kernels as one, for steps that always make the same ones.

A decode step of a small model calls some two hundred kernels of a few microseconds each. Python takes as long
between two of them, and so do the threads that begin and end each. Here the calls are noted once, with their
arguments, and then made one behind the other by threads that stay: between two calls they only wait for each
other. (As a CUDA graph does for a GPU.)

What is at the addresses may change from run to run; the addresses may not.
"""

import ctypes
import platform
from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir

from headway_runtime.kernels.cpu.compiler import TORCH_LIBRARY, Call, Kernel
from headway_runtime.kernels.cpu.elements import I32, I64
from headway_runtime.kernels.cpu.emitter import KERNEL_TYPE, Emitter

# An entry: the function and how many threads have come back from it, in a cache line of their own, and then
# its arguments, which begin with the counter of its tasks.
LONGS = 24
FUNCTION, ARRIVED, ARGUMENTS = 0, 1, 8
LONG_BYTES = 8
# So often a thread looks whether the others have come before it lets another program have the processor.
LOOKS = 4096
NAME = "tape"


class Tape:
    """Calls, and who owns the memory that they are about."""

    __slots__ = ("_counters", "_entries", "_kernel", "_owners")

    def __init__(self, calls: Sequence[Call], owners: object) -> None:
        self._owners = owners
        self._entries = torch.zeros((len(calls), LONGS), dtype=torch.int64)
        for entry, (function, arguments) in zip(self._entries.numpy(), calls, strict=True):
            entry[FUNCTION] = function
            entry[ARGUMENTS + 1 : ARGUMENTS + 1 + len(arguments)] = arguments
        self._counters = [self._entries.numpy()[:, place] for place in (ARRIVED, ARGUMENTS)]
        self._kernel = Kernel(NAME, _text())

    @property
    def num_calls(self) -> int:
        return len(self._entries)

    def run(self) -> None:
        """Make them all, with as many threads as PyTorch computes with."""
        for counter in self._counters:
            counter[:] = 0
        self._kernel.run(
            torch.get_num_threads(), self._entries.data_ptr(), len(self._entries), *_system_functions()
        )


@cache
def _system_functions() -> tuple[int, int]:
    """Addresses: how many threads there are in this parallel region, and what lets others compute."""
    found = (ctypes.CDLL(str(TORCH_LIBRARY)).omp_get_num_threads, ctypes.CDLL(None).sched_yield)
    first, second = (ctypes.cast(one, ctypes.c_void_p).value for one in found)
    assert first
    assert second
    return first, second


@cache
def _text() -> str:
    emitter = Emitter(NAME, 1)
    builder, function_type = emitter.builder, ir.FunctionType(I32, [])
    entries, count, team_size, give_way = (emitter.argument(index) for index in range(1, 5))
    own = builder.call(builder.inttoptr(team_size, function_type.as_pointer()), [])
    num_threads = builder.zext(own, I64)
    with emitter.loop(count) as index:
        entry = emitter.offset(entries, (index, LONGS * LONG_BYTES))
        function = emitter.load_integer(entry, emitter.integer(FUNCTION))
        place = emitter.offset(entry, (emitter.integer(ARGUMENTS), LONG_BYTES))
        builder.call(builder.inttoptr(function, KERNEL_TYPE.as_pointer()), [place])
        _meet(emitter, emitter.offset(entry, (emitter.integer(ARRIVED), LONG_BYTES)), num_threads, give_way)
    return emitter.finish()


def _meet(emitter: Emitter, counter: ir.Value, num_threads: ir.Value, give_way: ir.Value) -> None:
    """Go on when all threads have come here. What each wrote before, all see after it."""
    builder = emitter.builder
    pointer = builder.inttoptr(counter, I64.as_pointer())
    builder.atomic_rmw("add", pointer, emitter.integer(1), "acq_rel")
    looks = emitter.variable(emitter.integer(0))
    look, wait, end = (emitter.function.append_basic_block(name) for name in ("look", "wait", "met"))
    builder.branch(look)
    builder.position_at_end(look)
    arrived = builder.load_atomic(pointer, "acquire", LONG_BYTES)
    builder.cbranch(builder.icmp_signed("<", arrived, num_threads), wait, end)
    builder.position_at_end(wait)
    # Tells the processor that this is a loop that waits.
    if platform.machine() in ("x86_64", "AMD64"):
        emitter.call("llvm.x86.sse2.pause", ir.VoidType())
    elif platform.machine() in ("aarch64", "arm64"):
        emitter.call("llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))
    number = builder.add(looks.get(), emitter.integer(1))
    looks.set(number)
    with builder.if_then(builder.icmp_signed(">", number, emitter.integer(LOOKS))):
        builder.call(builder.inttoptr(give_way, ir.FunctionType(I32, []).as_pointer()), [])
    builder.branch(look)
    builder.position_at_end(end)
