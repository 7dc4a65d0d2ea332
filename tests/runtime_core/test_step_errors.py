"""What the compiler of kernels raises in a step ends that step's requests, and nothing else."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from headway_runtime.config import Envelope, Limits
from headway_runtime.request import FinishReason

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
COMPILER_ERRORS = [
    pytest.param(OutOfResources(300_000, 232_448, "shared memory"), id="a kernel too large for the GPU"),
    pytest.param(PermissionError(13, "Permission denied"), id="a cache that cannot be written"),
]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", COMPILER_ERRORS)
def test_a_kernel_that_cannot_be_compiled_ends_its_step_alone(
    error: Exception, start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start_engine(envelope=Envelope(1, 64), limits=Limits(1, 64))
    for name in ("a", "b"):
        driver.add(name, range(20), **GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(driver.engine._runner, "_compute", raising(error))
        (output,) = driver.step()

    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert output.error.startswith(f"RuntimeError: {type(error).__name__}: ")
    driver.run()
    assert len(driver.tokens("b")) == 8


@pytest.mark.parametrize("error", COMPILER_ERRORS)
def test_a_kernel_that_cannot_be_compiled_is_an_error_of_a_step_wherever_it_is_launched(
    error: Exception, start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = start_engine().engine._runner
    monkeypatch.setattr(runner._cache, "clear", raising(error))

    with pytest.raises(RuntimeError, match=type(error).__name__):
        runner.clear_blocks(array("q", [1]))
