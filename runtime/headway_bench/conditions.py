"""What must be known to read a report: the machine, the versions, the command. Measures nothing."""

import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("headway", "httptools", "numpy", "uvloop")


def client_conditions() -> dict[str, Any]:
    """The machine that sends; the server's own is not to be seen from here."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "packages": _versions(),
    }


def now() -> str:
    """The time, for the report."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()


def _versions() -> Mapping[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
