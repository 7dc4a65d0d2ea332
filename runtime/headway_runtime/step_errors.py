"""What a step raises of which nothing is broken but that step, as the loop of steps knows it.

A kernel that is launched for the first time is compiled then. Triton's errors of that, and those of the files
and programs that it needs, are exceptions of their own; the device goes on as before. The loop, which knows
no compiler, ends a step's requests for a RuntimeError, and the engine for what it does not know.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])

# An unwritable or full cache; an assembler or a C compiler that is not there, or fails.
_AROUND_COMPILING = (OSError, subprocess.SubprocessError)


def ends_its_step_alone(method: Method) -> Method:
    """What compiling raises, such as OutOfResources, is raised as RuntimeError."""

    @wraps(method)
    def told(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            if not isinstance(error, _AROUND_COMPILING) and not _is_tritons(error):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return cast("Method", told)


def _is_tritons(error: Exception) -> bool:
    """Without importing it: who has not has none of its errors."""
    errors = sys.modules.get("triton.errors")
    return errors is not None and isinstance(error, errors.TritonError)
