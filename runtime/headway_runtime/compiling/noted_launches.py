"""Triton without a GPU: which kernels work would launch, and compiling them for a GPU that others use.

While launches are noted a driver stands in for Triton's that knows nothing but the GPU's capability, and a
hook of Triton's takes what would be compiled. So what is noted is what Triton itself makes of a launch: its
files are then found under the same names when the kernel is really launched.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headway_runtime.kernels.triton.launch import Gpu, imagine

THREADS_PER_WARP = 32


@dataclass(frozen=True, slots=True)
class NotedLaunch:
    """A kernel as it is launched, in Triton's own words.

    signature, constants, attributes: of its arguments.
    """

    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def num_characters(self) -> int:
        """Of its source, a measure for how long compiling takes."""
        return len(self.kernel.src)


class OfflineDriver:
    """What Triton asks a driver of before it compiles a launch."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def target_of(gpu: Gpu) -> GPUTarget:
    return GPUTarget("cuda", gpu.capability, THREADS_PER_WARP)


def noted_launches(gpu: Gpu, work: Callable[[], None]) -> list[NotedLaunch]:
    """Of all that `work` launches, each kernel once for each way in which it must be compiled.

    Nothing runs: whatever kernels would write stays as it is.
    """
    found: dict[tuple[str, str], NotedLaunch] = {}

    def note(*, fn: Any, compile: Mapping[str, Any], **rest: Any) -> bool:  # noqa: A002 - Triton's name
        told = json.loads(compile["specialization_data"])
        # As JSON has no tuples.
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in told["options"].items()
        }
        launch = NotedLaunch(
            fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options
        )
        found[launch.name, str(compile["key"])] = launch
        return True  # it is not to be compiled now

    knobs, driver = triton.knobs.runtime, triton.runtime.driver
    before = knobs.jit_cache_hook
    knobs.jit_cache_hook = note
    driver.set_active(OfflineDriver(target_of(gpu)))
    imagine(gpu)
    try:
        work()
    finally:
        knobs.jit_cache_hook = before
        driver.set_active(None)  # Triton's own, which it looks for when it next needs one
    return list(found.values())


def compile_launch(launch: NotedLaunch, target: GPUTarget) -> Any:
    """Into Triton's folder; returns Triton's compiled kernel. Whatever Triton's compiler raises."""
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), dict(launch.attributes))
    return triton.compile(source, target=target, options=dict(launch.options))


def build_launcher(compiled: Any) -> None:
    """Triton 3.6 also compiles, in C, how a kernel is called; later ones do not, and need a GPU to say so."""
    from triton.backends.nvidia.driver import CudaLauncher

    # Where it cannot be had without a GPU it is made at the first launch, in a fraction of a second.
    with contextlib.suppress(AssertionError, AttributeError, RuntimeError, OSError, ImportError):
        CudaLauncher(compiled.src, compiled.metadata)
