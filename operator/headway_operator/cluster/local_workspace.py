"""The private folder of one `headway up`: logs, port files, the gateway's table, key files. Gone at its end;
of a run in which something failed, the logs stay.

A folder whose owner was killed is removed by the next one that starts: its lock is no longer held.
"""

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PREFIX = "headway-up-"
NEW_PREFIX = ".headway-new-"
LOCK_NAME = "lock"


class Workspace:
    """Made (mode 0700) and locked at construction; `remove` deletes it."""

    def __init__(self, parent: Path | None = None) -> None:
        root = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(root)
        # Locked before it gets the name that others look for, so that none takes it for abandoned.
        made = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=root))
        self._lock = os.open(made / LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(root / made.name.replace(NEW_PREFIX, PREFIX, 1))
        for folder in (self.admin, self.logs, self.ports, self.mounts, self.results):
            folder.mkdir(mode=0o700)

    @property
    def admin(self) -> Path:
        """What the admin ConfigMap would hold in a pod."""
        return self.path / "admin"

    @property
    def logs(self) -> Path:
        """One log file per replica and gateway."""
        return self.path / "logs"

    @property
    def ports(self) -> Path:
        """Where each child writes the port it bound."""
        return self.path / "ports"

    @property
    def mounts(self) -> Path:
        """What a pod would find in its volumes, one folder per volume."""
        return self.path / "mounts"

    @property
    def results(self) -> Path:
        """What Jobs leave behind, one file per Job."""
        return self.path / "results"

    @property
    def backends_file(self) -> Path:
        """The gateway's table of replicas."""
        return self.path / "backends.json"

    @property
    def public_key_file(self) -> Path:
        """The public keys that replicas and the gateway trust."""
        return self.admin / "public.pem"

    def remove(self, *, keep_logs: bool = False) -> None:
        """Delete the folder, or all of it but the logs; a second call is harmless."""
        if keep_logs:
            # The lock goes with the rest, so that nobody takes what stays for abandoned and removes it.
            for inside in self.path.glob("*"):
                if inside.is_dir() and inside != self.logs:
                    shutil.rmtree(inside, ignore_errors=True)
                elif inside != self.logs:
                    inside.unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` in one step (mode 0600), so that a reader sees the old content or the new."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    Path(temporary).replace(path)


def write_backends(path: Path, backends: list[dict[str, Any]], waiting_for: str) -> None:
    """Write the gateway's table: a list of {"id", "url", "state": "ready" | "draining"}.

    waiting_for: what a replica that is not among them does, for clients that wait in vain.
    """
    table = {"version": 1, "backends": backends, "waiting_for": waiting_for}
    write_atomically(path, json.dumps(table).encode())


def remove_abandoned(root: Path) -> None:
    """Remove the folders under `root` whose owners have died."""
    for folder in root.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
        except OSError:
            continue  # another user's, or being made at this moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(descriptor)
