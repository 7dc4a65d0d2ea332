"""Brings files into the cache: continued where they were left, checked while they arrive, several at once.

For each file:

1. What an earlier fetch left of it is read through the checksum, and the rest is asked for from there on. A
   file whose source gives no checksum is begun anew: nothing would tell that its beginning had suffered.
2. Bytes go through the checksum and to the end of the partial file. When the connection breaks, the same
   again; tries that bring next to nothing are counted and bounded by `Patience`.
3. The size and the checksum must be right; then the blob gets its name. A wrong one is thrown away and
   fetched once more from its beginning, and after that it is an error.

A blob that is in place already (another tool may have fetched it) is only compared with its checksum.
"""

import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from headway_runtime.errors import ModelFetchError, NoRoomError
from headway_runtime.sources.checksums import Digest, digest_for
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.remote import Remote, RemoteFile, TransientError
from headway_runtime.sources.store import Store

logger = logging.getLogger(__name__)

NUM_FILES_AT_ONCE = 8
READ_BYTES = 1 << 20
# A try that brings as much has gone well, and counting begins anew.
GOOD_TRY_BYTES = 1 << 20
NUM_WRONG = 2


class Watcher(Protocol):
    """Who is told how it goes. From any thread."""

    def there(self, num_bytes: int) -> None: ...
    def expect(self, num_bytes: int, num_files: int) -> None: ...
    def arrived(self, num_bytes: int) -> None: ...
    def file_done(self) -> None: ...


class StoppedError(Exception):
    """Another file has failed, so nobody waits for this one."""


class Transfer:
    """What fetches files of one source into one store. The caller holds the store's lock."""

    def __init__(self, remote: Remote, store: Store, patience: Patience, watcher: Watcher) -> None:
        self._remote = remote
        self._store = store
        self._patience = patience
        self._watcher = watcher
        self._stopped = threading.Event()

    def bring(self, files: Sequence[RemoteFile], what: str) -> None:
        """Have all of them in the store. ModelFetchError for the first that cannot be had."""
        by_key = {file.key: file for file in files if not self._store.is_checked(file)}
        there = {file.key: file.num_bytes for file in files if file.key not in by_key}
        self._watcher.there(sum(there.values()))
        self._watcher.expect(sum(file.num_bytes for file in by_key.values()), len(by_key))
        if not by_key:
            return
        self._check_room(list(by_key.values()), what)
        with ThreadPoolExecutor(NUM_FILES_AT_ONCE, "headway-fetch") as pool:
            futures = [pool.submit(self._bring_one, file, what) for file in by_key.values()]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [one for one in done if one.exception() is not None]
            if failed:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
        for future in failed:
            if not isinstance(future.exception(), StoppedError):
                future.result()

    def _check_room(self, files: Sequence[RemoteFile], what: str) -> None:
        """Rather than fill a disk for an hour and fail then."""
        wanted = sum(file.num_bytes - _size(self._store.partial(file.key)) for file in files)
        wanted -= sum(_size(self._store.blob(file.key)) for file in files)
        free = shutil.disk_usage(self._store.path).free
        if wanted > free:
            raise NoRoomError(
                f"{what}: {wanted / 1e9:.2f} GB are still to come, but {str(self._store.path)!r} has "
                f"{free / 1e9:.2f} GB free; {self._store.remedy}"
            )

    def _bring_one(self, file: RemoteFile, what: str) -> None:
        what = f"{what}: {file.path}"
        if self._is_there(file):
            self._watcher.arrived(file.num_bytes)
        else:
            for left in reversed(range(NUM_WRONG)):
                found = self._fetch(file, what)
                wanted = file.checksum.value if file.checksum else found
                if found == wanted:
                    break
                self._watcher.arrived(-file.num_bytes)
                with self._store.writing(self._store.partial(file.key)):
                    self._store.partial(file.key).unlink()
                complaint = f"{what}: its checksum is {found!r} where the source says {str(file.checksum)!r}"
                if not left:
                    raise ModelFetchError(
                        f"{complaint}; it was fetched {NUM_WRONG} times and thrown away. A proxy, or the "
                        "source's own storage, gives other bytes than were stored"
                    )
                logger.warning("%s; fetching it again", complaint)
            self._store.place(file)
        self._watcher.file_done()

    def _is_there(self, file: RemoteFile) -> bool:
        """Whether the blob has been put there by someone, and is right."""
        blob = self._store.blob(file.key)
        if file.checksum is None or _size(blob) != file.num_bytes:
            return False
        digest = digest_for(file.checksum, file.num_bytes)
        try:
            self._read_through(blob, digest)
        except OSError:
            return False
        if digest.value() != file.checksum.value:
            logger.warning("%s: is not what its name says; it is fetched again", blob)
            return False
        self._store.keep(file)
        return True

    def _fetch(self, file: RemoteFile, what: str) -> str:
        """Have all bytes in the partial file; what their checksum is ("" without one)."""
        failures = 0
        while True:
            before = _size(self._store.partial(file.key))
            try:
                return self._try(file, what)
            except TransientError as error:
                gained = _size(self._store.partial(file.key)) - before
                failures = 1 if gained >= GOOD_TRY_BYTES else failures + 1
                self._patience.pause(failures, error, what)

    def _try(self, file: RemoteFile, what: str) -> str:
        partial = self._store.partial(file.key)
        digest = digest_for(file.checksum, file.num_bytes) if file.checksum else None
        with self._writing(partial), partial.open("ab+", buffering=0) as opened:
            have = self._continued(opened.fileno(), partial, digest, file.num_bytes)
            told = have
            self._watcher.arrived(have)
            try:
                if have < file.num_bytes:
                    with self._remote.open(file, have) as stream:
                        if stream.offset != have:
                            self._watcher.arrived(-have)
                            have = told = 0
                            digest = digest_for(file.checksum, file.num_bytes) if file.checksum else None
                            os.ftruncate(opened.fileno(), 0)
                        for chunk in self._until_stopped(stream.chunks):
                            have += len(chunk)
                            if have > file.num_bytes:
                                raise TransientError(f"more bytes come than its size, {file.num_bytes}")
                            opened.write(chunk)
                            if digest is not None:
                                digest.update(chunk)
                            self._watcher.arrived(len(chunk))
                            told = have
                if have != file.num_bytes:
                    raise TransientError(f"it ended after {have} of {file.num_bytes} bytes")
            except TransientError:
                self._watcher.arrived(-told)  # counted again when it is continued
                if have > file.num_bytes:
                    os.ftruncate(opened.fileno(), 0)
                raise
        return digest.value() if digest else ""

    def _continued(self, descriptor: int, partial: Path, digest: Digest | None, num_bytes: int) -> int:
        """How much of it is there to go on from, read through the checksum."""
        have = os.fstat(descriptor).st_size
        if have and (digest is None or have > num_bytes):
            os.ftruncate(descriptor, 0)
            return 0
        if have and digest is not None:
            self._read_through(partial, digest)
        return have

    def _read_through(self, path: Path, digest: Digest) -> None:
        with path.open("rb", buffering=0) as opened:
            for chunk in self._until_stopped(iter(lambda: opened.read(READ_BYTES), b"")):
                digest.update(chunk)

    def _until_stopped(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._stopped.is_set():
                raise StoppedError
            yield chunk

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """As the store's, and what may only be told of a full disk is told."""
        with self._store.writing(path):
            try:
                yield
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoRoomError(
                        f"{path}: the disk is full ({error.strerror}); {self._store.remedy}. "
                        "What has come is kept: start again to go on"
                    ) from error
                raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
