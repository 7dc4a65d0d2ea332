"""One source's folder in the cache, in the layout of the Hugging Face Hub's own cache.

    blobs/KEY                   content, each under a name that names it
    blobs/KEY.headway-partial   the beginning of one, to be continued
    snapshots/IDENTITY/NAME     a model: links to blobs
    refs/REVISION               the identity that a branch or tag had when it was last looked up
    .headway/IDENTITY.json      which files make the model, written when all are there and checked; "adopted"
                                where nobody could be asked which they are
    .headway/checked/KEY        that a blob was compared with its checksum
    .headway/lock               held by the process that fetches

A model is used only where its IDENTITY.json stands and every file that it lists is there in full. Everything
else may be the rest of an interrupted fetch. Files come into place by renaming, after their bytes are on
disk. So what other tools fetched into the Hub's cache is used, and they use what is fetched here. A snapshot
of theirs may also hold the files themselves: these give way to links only where the blobs are there.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway_runtime.errors import ModelFetchError, NoRoomError
from headway_runtime.sources.remote import RemoteFile

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".headway-partial"
OWN_FOLDER = ".headway"
MANIFEST_VERSION = 1
LOCK_POLL_SECONDS = 0.1
WAITING_LOG_SECONDS = 30.0
# What the system says where a disk, a quota or a file may not grow.
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@dataclass(frozen=True, slots=True)
class Store:
    """The folder at `path`; `remedy` is what to do where it cannot be written.

    suffix: of the names of manifests, for what is no model.
    """

    path: Path
    remedy: str
    suffix: str = ""

    def partial(self, key: str) -> Path:
        return self.path / "blobs" / f"{key}{PARTIAL_SUFFIX}"

    def blob(self, key: str) -> Path:
        return self.path / "blobs" / key

    def snapshot(self, identity: str) -> Path:
        return self.path / "snapshots" / identity

    def complete(self, identity: str, *, or_adopted: bool = False) -> Path | None:
        """The folder of a model that is there in full.

        or_adopted: also one of which only its own index says what in full is.
        """
        folder = self.snapshot(identity)
        try:
            manifest = json.loads(self._manifest(identity).read_bytes())
            if manifest["version"] != MANIFEST_VERSION or (manifest.get("adopted") and not or_adopted):
                return None
            sizes = {str(one["name"]): int(one["bytes"]) for one in manifest["files"]}
            is_complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return folder if is_complete and sizes else None

    def known(self, revision: str) -> str | None:
        """The identity that `revision` had when it was last looked up."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.path / "refs" / revision).read_text(encoding="ascii").strip() or None
        return None

    def remember(self, revision: str, identity: str) -> None:
        """For `known`. A cache that cannot be written forgets."""
        if self.known(revision) != identity:
            with contextlib.suppress(OSError, ModelFetchError):
                self._write(self.path / "refs" / revision, identity.encode())

    def prepare(self) -> None:
        """Make the folders. ModelFetchError where that is not possible."""
        with self.writing(self.path):
            for name in ("blobs", "snapshots", f"{OWN_FOLDER}/checked"):
                (self.path / name).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Where something is written: what the system says of it, with its remedy."""
        try:
            yield
        except OSError as error:
            kind = NoRoomError if error.errno in FULL else ModelFetchError
            raise kind(f"{path}: cannot be written ({error.strerror}); {self.remedy}") from error

    @contextlib.contextmanager
    def lock(self, what: str) -> Iterator[None]:
        """Be the only process that fetches into this folder; wait for another one to end."""
        path = self.path / OWN_FOLDER / "lock"
        with self.writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(descriptor, path, what)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)  # which gives the lock back, as the end of the process does

    def _take(self, descriptor: int, path: Path, what: str) -> None:
        said_at = -WAITING_LOG_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                now = time.monotonic()
                if now - said_at >= WAITING_LOG_SECONDS:
                    said_at = now
                    holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "another process"
                    logger.info("%s: waiting for %s, which fetches it (%s)", what, holder, path)
                time.sleep(LOCK_POLL_SECONDS)
            except OSError as error:
                raise ModelFetchError(
                    f"{path}: this file system has no locks ({error.strerror}), without which two processes "
                    "could write one file; choose a folder on another one with --download-dir"
                ) from error

    def is_checked(self, file: RemoteFile) -> bool:
        """Whether the blob is there in full and was compared with its checksum, and not changed since."""
        try:
            stat = self.blob(file.key).stat()
            return stat.st_size == file.num_bytes and self._checked(file.key).read_text() == str(
                stat.st_mtime_ns
            )
        except OSError:
            return False

    def keep(self, file: RemoteFile) -> None:
        """A blob that is in place has been compared with its checksum."""
        with self.writing(self._checked(file.key)):
            self._write(self._checked(file.key), str(self.blob(file.key).stat().st_mtime_ns).encode())

    def place(self, file: RemoteFile) -> None:
        """The partial one is complete and right: put it where blobs are."""
        partial = self.partial(file.key)
        with self.writing(partial):
            with partial.open("rb+") as opened:
                os.fsync(opened.fileno())
            os.replace(partial, self.blob(file.key))
            _sync_folder(partial.parent)
        self.keep(file)

    def take_over(self, identity: str, name: str, file: RemoteFile) -> None:
        """Where a snapshot holds a file itself and no blob, make it a blob, too: no byte is copied or moved.

        What is in it is yet to be compared. Where the file system has no second names, nothing is done.
        """
        path, blob = self.snapshot(identity) / name, self.blob(file.key)
        with contextlib.suppress(OSError):
            if not path.is_symlink() and path.stat().st_size == file.num_bytes:
                os.link(path, blob)

    def publish(self, identity: str, source: str, files: Mapping[str, RemoteFile]) -> Path:
        """Make the model of these blobs, by the names that it is to have; from now on it is `complete`."""
        folder = self.snapshot(identity)
        with self.writing(folder):
            for name, file in files.items():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._link(self.blob(file.key), target)
            _sync_folder(folder)
        self.note(identity, source, files)
        return folder

    def note(
        self, identity: str, source: str, files: Mapping[str, RemoteFile], *, is_adopted: bool = False
    ) -> None:
        """Write the manifest, and nothing else, of a snapshot that is in place."""
        rows = [
            {"name": name, "bytes": file.num_bytes, "checksum": str(file.checksum) if file.checksum else None}
            for name, file in sorted(files.items())
        ]
        manifest = {"version": MANIFEST_VERSION, "source": source, "adopted": is_adopted, "files": rows}
        self._write(self._manifest(identity), json.dumps(manifest, indent=1).encode())

    def _link(self, blob: Path, target: Path) -> None:
        """By a symbolic link; where the file system has none, by a second name, or by moving it."""
        if not blob.exists():
            # What stands at `target` may be the only copy: a link to nothing must not take its place.
            raise ModelFetchError(
                f"{blob}: was removed while the model was fetched; fetch it again, and have nobody else "
                "clear the cache meanwhile"
            )
        if is_same(target, blob):
            return
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        try:
            os.symlink(os.path.relpath(blob, target.parent), aside)
        except OSError:
            try:
                os.link(blob, aside)
            except OSError:
                aside = blob
        os.replace(aside, target)

    def _manifest(self, identity: str) -> Path:
        return self.path / OWN_FOLDER / f"{identity}{self.suffix}.json"

    def _checked(self, key: str) -> Path:
        return self.path / OWN_FOLDER / "checked" / key

    def _write(self, path: Path, content: bytes) -> None:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with self.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(aside, path)
            _sync_folder(path.parent)


def is_same(path: Path, other: Path) -> bool:
    """Whether both are there and are one file."""
    try:
        return path.samefile(other)
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    """Have the names in it on disk, where the file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
