"""What a kernel needs of a multiprocessor, from the compiler alone: no GPU is asked.

Owns the walk over all kernels' `COMPILED` and the limits of each capability. Triton must not be interpreting.
Run as a program it compiles the cases of the files that are named, or of all, and prints a line of JSON for
each.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from headway_runtime.kernels import triton as kernels
from headway_runtime.kernels.triton.launch import CompileCase
from headway_runtime.kernels.triton.overlap import LEAST_CAPABILITY

# Shared memory that one block of threads may have, in bytes.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
REGISTERS_PER_MULTIPROCESSOR = 65536
THREADS_PER_WARP = 32
TOOL_SECONDS = 60
OWN_NAME = "resources"


@dataclass(frozen=True, slots=True)
class Resources:
    """registers, local_bytes: of a thread. shared_bytes: of a block of threads.

    local_bytes: spilled registers and arrays that are indexed by numbers known only when running.
    blocks_per_multiprocessor: as far as registers and shared memory allow.
    """

    label: str
    kernel: str
    capability: int
    registers: int
    local_bytes: int
    shared_bytes: int
    num_warps: int
    spill_bytes_allowed: int

    @property
    def blocks_per_multiprocessor(self) -> int:
        threads = self.num_warps * THREADS_PER_WARP
        # The driver keeps a kilobyte of every block's shared memory.
        by_shared = (SHARED_BYTES[self.capability] + 1024) // (self.shared_bytes + 1024)
        return min(by_shared, REGISTERS_PER_MULTIPROCESSOR // (max(1, self.registers) * threads))

    def faults(self) -> list[str]:
        """What keeps it from running, or from running well."""
        found = []
        if self.shared_bytes > SHARED_BYTES[self.capability]:
            found.append(f"shared_bytes={self.shared_bytes}, limit {SHARED_BYTES[self.capability]}")
        if self.local_bytes > self.spill_bytes_allowed:
            found.append(f"local_bytes={self.local_bytes}, allowed {self.spill_bytes_allowed}")
        if self.registers * self.num_warps * THREADS_PER_WARP > REGISTERS_PER_MULTIPROCESSOR:
            found.append(f"registers={self.registers} for {self.num_warps} warps")
        return found


def module_names() -> list[str]:
    """The files of this folder, less this one."""
    return [found.name for found in iter_modules(kernels.__path__) if found.name != OWN_NAME]


def cases_of(module_name: str) -> list[CompileCase]:
    cases: list[CompileCase] = getattr(import_module(f"{kernels.__name__}.{module_name}"), "COMPILED", [])
    return cases


def forgotten_kernels(module_name: str) -> list[str]:
    """Kernels that the file defines, functions named `..._kernel`, and that none of its cases compiles."""
    module = import_module(f"{kernels.__name__}.{module_name}")
    known = {id(case.kernel) for case in cases_of(module_name)}
    return [
        f"{module_name}.{name}"
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and value.__module__ == module.__name__
        and name.endswith("_kernel")
        and id(value) not in known
    ]


def compile_case(case: CompileCase, capability: int) -> Resources:
    """CompilationError and others where Triton or ptxas refuse it."""
    compiled = compiled_kernel(case, capability)
    registers, local_bytes = _of_cubin(compiled.asm["cubin"])
    return Resources(
        case.label,
        case.kernel.fn.__name__,
        capability,
        registers,
        local_bytes,
        compiled.metadata.shared,
        compiled.metadata.num_warps,
        case.spill_bytes,
    )


def compiled_kernel(case: CompileCase, capability: int) -> Any:
    """Triton's compiled kernel; its `asm` has the machine code and what came before it, by name."""
    constants = constants_of(case, capability)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, name in enumerate(case.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind, _, multiple = case.signature[name].partition(":")
        signature[name] = kind
        if multiple == "16" or (kind.startswith("*") and not multiple):
            attributes[(index,)] = [["tt.divisibility", 16]]
    unknown = set(constants) | set(case.signature)
    unknown -= set(case.kernel.arg_names)
    if unknown:
        raise ValueError(f"case {case.label!r}: {sorted(unknown)} are no arguments of {case.kernel.__name__}")
    source = ASTSource(case.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(case.options))


def constants_of(case: CompileCase, capability: int) -> dict[str, object]:
    """And whether the kernel is launched early, which follows from the capability."""
    own = {"overlaps": capability >= LEAST_CAPABILITY} if "overlaps" in case.kernel.arg_names else {}
    return {**case.constants, **own}


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        said = subprocess.run(
            [tool, "--dump-resource-usage", str(file)],
            check=True,
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS,
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def main(chosen: list[str]) -> int:
    """1 if anything is at fault."""
    names = chosen or module_names()
    lines: list[dict[str, object]] = [{"forgotten": one} for name in names for one in forgotten_kernels(name)]
    for line in lines:
        print(json.dumps(line), flush=True)
    has_faults = bool(lines)
    for case in (case for name in names for case in cases_of(name)):
        for capability in case.capabilities:
            try:
                found = compile_case(case, capability)
            except Exception as error:  # noqa: BLE001 (whatever Triton's compiler raises is what is asked for)
                line = {"label": case.label, "capability": capability, "faults": [repr(error)]}
            else:
                line = {**asdict(found), "faults": found.faults()}
            has_faults |= bool(line["faults"])
            print(json.dumps(line), flush=True)
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
