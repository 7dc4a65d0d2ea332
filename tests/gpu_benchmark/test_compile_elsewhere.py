"""Kernels of the benchmark, compiled without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.compile_elsewhere", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    return subprocess.run(
        command,
        env=inherited | {"PYTHONPATH": f"{ROOT}/runtime:{ROOT}"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_what_a_launch_reads_is_left_to_carry(tmp_path: Path) -> None:
    done = run(
        *("--what", "timed", "--kernel", "place_step", "--processes", "1", "--strip"),
        TRITON_CACHE_DIR=str(tmp_path),
    )

    assert done.returncode == 0, done.stderr
    kernels = [file.name for file in tmp_path.rglob("*.cubin")]
    assert kernels == ["place_step_kernel.cubin"] * len(kernels)
    assert f"timed: {len(kernels)} kernels\n" in done.stdout
    assert "refused" not in done.stdout
    assert len(kernels) > 0
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".cubin", ".json"}


def test_cases_that_look_at_their_numbers_are_named(tmp_path: Path) -> None:
    done = run(
        *("--what", "checked", "--kernel", "draw", "place_step", "--processes", "1"),
        TRITON_CACHE_DIR=str(tmp_path),
    )

    assert done.returncode == 0, done.stderr
    assert "checked: not noted, compiled when it is launched: draws of 330, greedy\n" in done.stdout
    assert [*tmp_path.rglob("place_step_kernel.cubin")]


def test_without_a_folder_to_carry_nothing_is_compiled() -> None:
    done = run("--what", "timed", "--kernel", "place_step")

    assert done.returncode == 2
    assert "TRITON_CACHE_DIR names no folder" in done.stderr
