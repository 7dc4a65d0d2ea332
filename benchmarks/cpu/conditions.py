"""Of what, where and when something was measured."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

GIT_TIMEOUT_SECONDS = 10.0


def conditions() -> dict[str, object]:
    """What results are to name, at this moment. date: of UTC."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }


def commit() -> str:
    """Of this checkout, as git names it; it ends in "-dirty" with changes that are in no commit."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        timeout=GIT_TIMEOUT_SECONDS,
        check=False,
    )
    return done.stdout.strip()


def processor_name() -> str:
    """As the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
