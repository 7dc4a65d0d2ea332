"""Kernels compute to the bit what they do in Triton's interpreter as it is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Conversions of random bits and of small numbers, then the first case of each kernel, with the same random
# numbers in both processes.
PROGRAM = """
import sys
from hashlib import sha256

from benchmarks.gpu.interpreted import interpret

interpret()
if sys.argv[1] == "hastened":
    from benchmarks.gpu.fast_interpreter import hasten

    hasten()

import numpy as np
import torch
from benchmarks.gpu.cases.checked import checked_cases
from triton.language import bfloat16, float8e4nv, float8e5, float16, float32
from triton.runtime import interpreter

random = np.random.default_rng(1)
for taken in (float32, float16, bfloat16, float8e4nv, float8e5):
    bits = random.integers(0, 256, (37, 5, taken.primitive_bitwidth // 8), dtype=np.uint8)
    wide = random.standard_normal((37, 5)).astype(np.float32) * random.integers(0, 2, (37, 5))
    every = [bits.view(f"u{bits.shape[-1]}")[..., 0]]
    every += [wide.astype(np.float32).T] if taken is float32 else []
    for given in (float32, float16, bfloat16, float8e4nv, float8e5):
        for one in every:
            try:
                found = interpreter._convert_float(one, taken, given, None)
            except OverflowError:
                print(taken, given, "cannot be")
                continue
            print(taken, given, found.shape, found.dtype, sha256(found.tobytes()).hexdigest())

cases = {}
for case in checked_cases(is_smoke=True):
    cases.setdefault(case.kernel, case)
for case in cases.values():
    work = case.make(torch.Generator().manual_seed(1))
    shown = work.shown(work.run())
    found = shown if isinstance(shown, tuple) else (shown,)
    print(case.name, *(sha256(one.contiguous().view(torch.uint8).numpy()).hexdigest() for one in found))
"""


def printed(how: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()


def test_results_are_the_same_to_the_bit() -> None:
    hastened = printed("hastened")
    assert len(hastened) > 20
    assert hastened == printed("as it is")
