"""Every kernel in every configuration of the tables is compiled, and fits the multiprocessors it is for."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.kernels.triton import decode_candidates, launch, paged_decode, paged_prefill
from headway_runtime.kernels.triton.launch import CAPABILITIES, configurations, tabled_kernels
from headway_runtime.kernels.triton.resources import Resources
from headway_runtime.parallel import one_shot

pytestmark = pytest.mark.long
TIMEOUT_SECONDS = 840
FOLDER = Path(launch.__file__).parent
SOURCES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
FILES_WITH_KERNELS = [name for name, text in SOURCES.items() if "@triton" in text and "_kernel(" in text]


@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
@pytest.mark.parametrize("name", FILES_WITH_KERNELS)
def test_a_files_kernels_fit_their_multiprocessors(name: str) -> None:
    """None spills, none is left out, and there is a case for each configuration of its kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "headway_runtime.kernels.triton.resources", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]

    print(done.stdout)
    assert done.returncode == 0, done.stderr + "".join(
        f"{line}\n" for line in lines if line.get("faults") or "forgotten" in line
    )
    # A case's label is its configuration's, and maybe more after a space.
    got = {(line["label"].split(" ")[0], line["capability"]) for line in lines}
    tabled = {label.split("/")[1] for label, _ in got}
    want = {
        (one.label, capability)
        for kernel in tabled
        for one in configurations(kernel)
        for capability in one.capabilities
    }
    assert want
    assert want <= got


def test_every_kernel_of_the_tables_is_some_files() -> None:
    kernels = {kernel for gpu in CAPABILITIES for kernel in tabled_kernels(gpu)}
    sources = "".join(SOURCES[name] for name in FILES_WITH_KERNELS) + Path(one_shot.__file__).read_text()

    assert kernels
    assert [kernel for kernel in kernels if f'"{kernel}"' not in sources] == []


@pytest.mark.parametrize(
    ("kernel", "classes"),
    [
        (paged_decode.KERNEL, decode_candidates.CANDIDATES),
        (paged_decode.WIDE_KERNEL, decode_candidates.WIDE_CANDIDATES),
        (paged_prefill.KERNEL, paged_prefill.CANDIDATES),
    ],
)
def test_candidates_are_what_configurations_are_made_of(
    kernel: str, classes: dict[str, list[dict[str, int]]]
) -> None:
    names = {
        frozenset(one.values) - {"maxnreg"}
        for one in configurations(kernel)
        if one.shape_class == launch.DEFAULT
    }

    for candidates in classes.values():
        assert candidates
        assert {frozenset(one) - {"maxnreg"} for one in candidates} == names


def test_what_does_not_fit_a_multiprocessor_is_a_fault() -> None:
    fits = Resources("one", "kernel", 90, 168, 0, 72_000, 4, 0)

    assert fits.faults() == []
    assert fits.blocks_per_multiprocessor == 3
    assert replace(fits, capability=80, shared_bytes=170_000).faults() == [
        "shared_bytes=170000, limit 166912"
    ]
    assert replace(fits, local_bytes=8).faults() == ["local_bytes=8, allowed 0"]
    assert replace(fits, registers=255, num_warps=16).faults() == ["registers=255 for 16 warps"]
