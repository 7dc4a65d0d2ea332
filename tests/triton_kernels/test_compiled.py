"""Every kernel in every configuration of the tables is compiled, and fits the multiprocessors it is for."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from headway_runtime.kernels.triton.launch import CAPABILITIES, configurations, tabled_kernels

TIMEOUT_SECONDS = 280


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """What `resources` says of every case; it runs where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "headway_runtime.kernels.triton.resources"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_case_fits_its_multiprocessors_without_spilling(compiled: list[dict[str, Any]]) -> None:
    faults = [line for line in compiled if line.get("faults")]

    assert compiled
    assert not faults, "\n".join(json.dumps(line) for line in faults)


def test_no_kernel_is_left_out(compiled: list[dict[str, Any]]) -> None:
    assert [line["forgotten"] for line in compiled if "forgotten" in line] == []


def test_every_configuration_of_the_tables_is_compiled(compiled: list[dict[str, Any]]) -> None:
    want = {
        (one.label, capability)
        for gpu in CAPABILITIES
        for kernel in tabled_kernels(gpu)
        for one in configurations(kernel)
        for capability in one.capabilities
    }

    # A case's label is its configuration's, and maybe more after a space.
    got = {(line["label"].split(" ")[0], line["capability"]) for line in compiled if "label" in line}
    assert want <= got
