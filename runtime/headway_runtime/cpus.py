"""How many processors this process may use: its affinity mask, cut down to its cgroup's CPU limit."""

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Processors worth one thread each, at least 1. A limit of 1.5 CPUs is worth 2 threads."""
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    limit = cgroup_cpu_limit(cgroup_root)
    return max(1, count if limit is None else min(count, math.ceil(limit)))


def cgroup_cpu_limit(root: Path = CGROUP_ROOT) -> float | None:
    """CPUs that the cgroup of this container allows (version 2, else 1); None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    try:
        quota_microseconds, period_microseconds = int(quota), int(period)
    except ValueError:  # "max": no limit
        return None
    if quota_microseconds <= 0 or period_microseconds <= 0:
        return None
    return quota_microseconds / period_microseconds
