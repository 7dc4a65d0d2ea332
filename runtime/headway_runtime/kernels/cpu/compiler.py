"""Compiles kernels for this processor and runs them on the threads that PyTorch computes with.

The threads are those of the OpenMP library that PyTorch has loaded: a second pool beside it would compete for
the same processors. Where there is none that we can call (macOS, Windows), or the processor is too old, or
the system lets no program make code, there are no kernels, and layers do the same with PyTorch's operators.
"""

import ctypes
import logging
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import get_ident

import llvmlite.binding as llvm
import torch

from headway_runtime.kernels.cpu.elements import Elements
from headway_runtime.kernels.cpu.processor import features, has_features

logger = logging.getLogger(__name__)

TORCH_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
# Without these, LLVM makes calls of what should be one instruction.
NEEDED_ON_X86 = ("avx2", "fma", "f16c")
# Fewer lanes than this are not worth a kernel.
LEAST_WIDTH = 4

_Integers = ctypes.c_int64 * 16


# A kernel's address, and its arguments without the counter.
Call = tuple[int, tuple[int, ...]]
# By thread, where it notes what it calls.
_notes: dict[int, list[Call]] = {}


@contextmanager
def noted_calls() -> Iterator[list[Call]]:
    """The calls of kernels that this thread makes meanwhile."""
    calls: list[Call] = []
    _notes[get_ident()] = calls
    try:
        yield calls
    finally:
        del _notes[get_ident()]


def _note(address: int, arguments: tuple[int, ...]) -> None:
    calls = _notes.get(get_ident())
    if calls is not None:
        calls.append((address, arguments))


class Kernel:
    """One compiled kernel and room for its arguments; for one thread at a time.

    Its first argument is the counter of its tasks, which starts at 0; `run` takes the others.
    """

    __slots__ = ("_address", "_alone", "_arguments", "_parallel", "_place")

    def __init__(self, name: str, text: str) -> None:
        self._address = _compiled(name, text)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._parallel = _parallel()
        self._arguments = _Integers()
        self._place = ctypes.addressof(self._arguments)

    def run(self, num_threads: int, *arguments: int) -> None:
        """arguments: integers and addresses; what these point to must be there until this returns."""
        self._arguments[0 : len(arguments) + 1] = [0, *arguments]
        if _notes:
            _note(self._address, arguments)
        if num_threads == 1:
            self._alone(self._place)
        else:
            self._parallel(self._address, self._place, num_threads, 0)


@cache
def are_available() -> bool:
    """Whether kernels can be compiled and run here."""
    try:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.check_jit_execution()
        _parallel()
    except (OSError, RuntimeError, AttributeError) as error:
        logger.info("no CPU kernels of our own: %s", error)
        return False
    if platform.machine() in ("x86_64", "AMD64") and not has_features(*NEEDED_ON_X86):
        logger.info("no CPU kernels of our own: this processor lacks one of %s", ", ".join(NEEDED_ON_X86))
        return False
    return True


def fitting_width(*sizes: int) -> int | None:
    """The most lanes that divide all of `sizes` and that suit this processor; None if too few."""
    widest = 16 if features().get("avx512f") else 8
    width = math.gcd(widest, *sizes)
    return width if width >= LEAST_WIDTH else None


@cache
def elements(dtype: torch.dtype) -> Elements:
    """How numbers of that type lie in memory."""
    match dtype:
        case torch.bfloat16:
            return Elements("bfloat16", 2, rounds_in_hardware=bool(features().get("avx512bf16")))
        case torch.float16:
            return Elements("float16", 2)
        case torch.float32:
            return Elements("float32", 4)
        case _:
            raise TypeError(f"dtype={dtype!r}: kernels compute on bfloat16, float16 and float32")


@cache
def _compiled(name: str, text: str) -> int:
    """The address of the function `name` of that module, which is kept for ever."""
    module = llvm.parse_assembly(text)
    module.verify()
    wanted = llvm.get_host_cpu_features()
    if wanted.get("avx512f"):
        # Some processors are thought faster with halves of vectors: not in kernels that do nothing else.
        wanted["prefer-256-bit"] = False
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=wanted.flatten(), opt=3
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address(name))


# What owns the machine code.
_ENGINES: list[llvm.ExecutionEngine] = []


@cache
def _parallel() -> "ctypes._NamedFuncPointer":
    """OpenMP's entry for a parallel region: function, its argument, number of threads, flags.

    Looked up from PyTorch's own library, so that it is that of the OpenMP library that PyTorch depends on.
    OSError or AttributeError without one.
    """
    function = ctypes.CDLL(str(TORCH_LIBRARY)).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
