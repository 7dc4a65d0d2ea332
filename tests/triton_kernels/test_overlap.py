"""Kernels that are launched early wait for those before them, in the machine code; others do not.

Nothing else would tell: interpreted kernels run one after the other, and on a GPU a race shows now and then.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway_runtime.errors import ConfigError
from headway_runtime.kernels.triton import launch, overlap
from headway_runtime.kernels.triton.launch import Gpu
from headway_runtime.kernels.triton.overlap import launched_early, lets_next_begin

FOLDER = Path(launch.__file__).parent
EARLY = sorted(path.stem for path in FOLDER.glob("*.py") if "**launched_early(" in path.read_text())
LETTING = sorted(path.stem for path in FOLDER.glob("*.py") if "**lets_next_begin(" in path.read_text())
# Whose machine code stands in another order than it runs in: it waits in a loop, and behind that.
LOOPING = "paged_decode"
# Whose loads before the wait are of weights, or of what a step is told.
READ_BEFORE = {"norm": {"weight_pointer"}, "paged_decode": {"context_lengths", "query_starts"}}
WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
# Triton does not interpret in it. Prints the PTX of a file's first cases, a line of JSON each.
PROGRAM = """
import json, sys
from headway_runtime.kernels.triton.resources import cases_of, compiled_kernel
cases = [case for case in cases_of(sys.argv[1]) if 90 in case.capabilities]
for case in cases[:2] + cases[-1:]:
    print(json.dumps(compiled_kernel(case, 90).asm["ptx"]))
"""


def codes_of(name: str) -> list[list[str]]:
    """Instructions of kernels of that file for capability 9.0."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line).splitlines() for line in done.stdout.splitlines()]
    assert found
    return found


def first(code: list[str], pattern: str) -> int:
    """The line; beyond the end if there is none."""
    return next((place for place, line in enumerate(code) if re.search(pattern, line)), len(code))


@pytest.mark.timeout(260)
@pytest.mark.parametrize("name", EARLY)
def test_what_is_launched_early_waits_before_it_writes_or_ends(name: str) -> None:
    for code in codes_of(name):
        wait = first(code, WAIT)
        assert first(code, LET) < wait < len(code)
        if name == LOOPING:
            continue
        assert wait < first(code, r"\bst\.global|\batom\.|\bred\.")
        # Each way out comes after a wait.
        assert wait < first(code, r"^\s*(@%p\d+ )?ret;")
        if name not in READ_BEFORE:
            assert wait < first(code, r"\bld\.global|\bcp\.async")


@pytest.mark.timeout(260)
@pytest.mark.parametrize("name", LETTING)
def test_what_lets_the_next_begin_is_not_launched_early_and_does_not_wait(name: str) -> None:
    assert name not in EARLY
    for code in codes_of(name):
        assert first(code, LET) < first(code, r"\bld\.global|\bst\.global|\bcp\.async")
        assert first(code, WAIT) == len(code)


@pytest.mark.parametrize("name", sorted(READ_BEFORE))
def test_before_the_wait_nothing_is_read_but_what_may_be(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    before = source[source.index(f"def {name}_kernel(") :].partition("wait_for_last(overlaps)")[0]

    assert set(re.findall(r"tl\.load\((\w+)", before)) == READ_BEFORE[name]
    assert not re.search(r"tl\.(store|atomic)", before)


def test_programs_of_attention_without_work_wait_as_well() -> None:
    source = (FOLDER / f"{LOOPING}.py").read_text()
    kernel, _, _ = source.partition(f"def {LOOPING}_kernel(")[2].partition("\ndef ")

    assert kernel.rstrip().endswith("\n    wait_for_last(overlaps)")


def test_only_gpus_that_can_launch_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "INTERPRETED", False)
    new, old = Gpu("new", 90, 132), Gpu("old", 80, 108)

    assert launched_early(new) == {"overlaps": True, "launch_pdl": True}
    assert lets_next_begin(new) == {"overlaps": True}
    assert launched_early(old) == lets_next_begin(old) == {"overlaps": False}
    monkeypatch.setattr(overlap, "ENABLED", False)
    assert launched_early(new) == lets_next_begin(new) == {"overlaps": False}


@pytest.mark.parametrize(("told", "want"), [("", True), ("1", True), ("0", False)])
def test_it_can_be_left_out(told: str, want: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    monkeypatch.setenv(overlap.VARIABLE, told)

    assert overlap._told() is want


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(overlap.VARIABLE, "off")

    with pytest.raises(ConfigError, match=r"HEADWAY_OVERLAP_LAUNCHES='off' is not known; use 0 or 1"):
        overlap._told()


def test_all_that_decode_steps_launch_is_known_to_the_tests() -> None:
    assert {"norm", "rotate_and_store", "paged_decode", "place_step", "vocabulary", "draw"} == set(EARLY)
    assert {"thin_product", "gated_product", "coded_product"} == set(LETTING)
    assert "overlaps" in inspect.signature(overlap.wait_for_last.fn).parameters
