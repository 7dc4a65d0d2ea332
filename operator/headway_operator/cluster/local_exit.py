"""Why a child process ended, in the words that Kubernetes has for it, and what it said last."""

import os
import signal
from pathlib import Path

from headway_operator.names import EXIT_STATUS_DOES_NOT_FIT, EXIT_STATUS_FETCH

TAIL_BYTES = 4096
VMSTAT = Path("/proc/vmstat")
# Begins why a supervisor killed a process that has never been ready.
NOT_READY = "not ready"


def explain_exit(
    returncode: int | None, killed_for: str, num_oom_kills: int, last_line: str
) -> tuple[str, str]:
    """Reason and message of an end that nobody asked for.

    returncode: as asyncio states it, negative for a signal. killed_for: why its supervisor killed it, or "".
    num_oom_kills: processes that the kernel killed for memory while this one ran.
    """
    reason = "CrashLoopBackOff"
    if killed_for:
        reason = "StartupProbeFailed" if killed_for.startswith(NOT_READY) else "LivenessProbeFailed"
        cause = f"killed because it was {killed_for}"
    elif returncode == -signal.SIGKILL and num_oom_kills > 0:
        reason, cause = "OOMKilled", "killed because memory ran out"
    elif returncode is not None and returncode < 0:
        cause = f"ended by {signal.Signals(-returncode).name}"
    elif returncode == EXIT_STATUS_FETCH:
        reason, cause = "ModelFetchFailed", "the model could not be fetched"
    elif returncode == EXIT_STATUS_DOES_NOT_FIT:
        reason, cause = "DoesNotFit", "the memory cannot hold the model"
    else:
        cause = f"exited with status {returncode}"
    return reason, f"{cause}; last line: {last_line}" if last_line else cause


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot; 0 where it does not say."""
    try:
        text = VMSTAT.read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def log_tail(path: Path, from_offset: int, num_lines: int) -> str:
    """The last lines of a log that are not blank, of those written after `from_offset`."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(from_offset, end - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])
