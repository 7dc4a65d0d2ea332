"""How much memory this process's container may have, as the kernel's control groups tell it (Linux alone).

Of version 2 and version 1 of them the least limit counts that is set on the process's own group or on one
above it, as far as they can be seen: a container sees its own as the root.
"""

from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# Version 1 has no word for "no limit": it says the largest number of pages there can be.
_UNLIMITED_BYTES = 2**60


def container_memory_bytes(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> int | None:
    """The limit; None where there is none, or none is told."""
    limits = [limit for file in _files(root, own_groups) if (limit := _read(file)) is not None]
    return min(limits, default=None)


def _files(root: Path, own_groups: Path) -> list[Path]:
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if ".." in path.split("/"):  # of a group that cannot be seen from here
            continue
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        files += [top / one / name for one in (group, *group.parents)]
    return files


def _read(file: Path) -> int | None:
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):  # "max" is no number
        return None
    return limit if 0 < limit < _UNLIMITED_BYTES else None
