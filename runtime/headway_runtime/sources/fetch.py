"""Fetches a remote model into the cache: the algorithm, whichever kind of source it is.

1. Ask the source what it holds. While it does not answer, what was last fetched of it is used.
2. What is there in full already is used as it is, without a lock.
3. Else take the source's lock, look again (another process may just have fetched it), and bring the small
   files first: a model that this engine does not have, or a quantization that it cannot read, is refused
   before the weights come.
4. Bring the weights that the index names, and nothing else.
5. Publish: links by the files' names, and last of all the manifest, without which nothing is used.

For a plan the weights' headers take the place of 4 and 5 (`weight_headers`), where what lies there are files:
an archive can only be read from its beginning on, so what is in one is fetched whole.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from headway_runtime.errors import ModelFetchError, ModelLoadError
from headway_runtime.sources import layers, wanted
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import RemoteModel
from headway_runtime.sources.remote import Listing, Remote, RemoteFile, TransientError
from headway_runtime.sources.store import OWN_FOLDER, Store
from headway_runtime.sources.transfer import Transfer, Watcher
from headway_runtime.sources.weight_headers import bring_headers, header_folder

logger = logging.getLogger(__name__)

# Refuses a model by its small files, in the folder that it is given, before the weights are fetched.
Check = Callable[[Path], None]
# Where something is cached to fall back on, fewer questions are asked of a source that does not answer.
TRIES_WITH_CACHE = 3


def fetch(
    model: RemoteModel,
    remote: Remote,
    store: Store,
    patience: Patience,
    watcher: Watcher,
    check: Check,
    kind: wanted.Kind = wanted.MODEL,
    *,
    headers_only: bool = False,
) -> Path:
    """The folder of `model`, complete and checked. ModelFetchError, or what `check` raises.

    headers_only: the weights are not needed, their headers are.
    """
    what = str(model)
    known = store.known(model.ref)
    # What nobody could be asked about will do while that stays so.
    cached = store.complete(known, or_adopted=True) if known else None
    try:
        asking = (
            replace(patience, num_tries=min(patience.num_tries, TRIES_WITH_CACHE)) if cached else patience
        )
        listing = asking.ask(remote.listing, what)
    except TransientError as error:
        if cached is not None:
            logger.warning("%s: %s; using what was fetched of it before (%s)", what, error, known)
            return cached
        raise ModelFetchError(f"{what}: {error}; {patience.given_up(what)}") from error
    identity = listing.identity
    headers_only = headers_only and not listing.archives

    def there() -> Path | None:
        folder = store.complete(identity)
        headers = header_folder(store, identity)
        return headers if folder is None and headers_only and headers.is_dir() else folder

    folder = there()
    if folder is None:
        store.prepare()
        with store.lock(what):
            folder = there()
            if folder is None:
                transfer = Transfer(remote, store, patience, watcher)
                fetching = _Fetching(what, listing, store, transfer, check, kind)
                folder = fetching.headers(remote, patience) if headers_only else fetching.run()
    if folder == header_folder(store, identity):
        return folder  # what is remembered is a model that is there in full: perhaps the one of before
    store.remember(model.ref, identity)
    return folder


class _Fetching:
    """One fetch of one listing. The store's lock is held."""

    def __init__(
        self,
        what: str,
        listing: Listing,
        store: Store,
        transfer: Transfer,
        check: Check,
        kind: wanted.Kind,
    ) -> None:
        self._kind = kind
        self._what = what
        self._listing = listing
        self._store = store
        self._transfer = transfer
        self._check = check
        self._taken_out: list[RemoteFile] = []

    def run(self) -> Path:
        small, weights = self._found()
        self._bring(weights)
        folder = self._store.publish(self._listing.identity, self._what, small | weights)
        # What archives were good for: their files have names of their own now.
        used = {file.key for file in (*small.values(), *weights.values())}
        for file in (*self._listing.archives, *self._taken_out):
            if file.key not in used:
                self._store.blob(file.key).unlink(missing_ok=True)
        return folder

    def headers(self, remote: Remote, patience: Patience) -> Path:
        """A folder with the small files, and no more of the weights than their headers."""
        small, weights = self._found()
        identity = self._listing.identity
        return bring_headers(self._store, remote, patience, identity, self._what, small, weights)

    def _found(self) -> tuple[dict[str, RemoteFile], dict[str, RemoteFile]]:
        """The small files, which are brought and looked at, and the weights, which are not."""
        files = self._unpacked() | {file.path: file for file in self._listing.files}
        below = self._listing.below
        if self._listing.is_nested:
            below = wanted.model_root(
                (path for path in files if is_below(path, below)), self._what, self._kind
            )
        prefix = f"{below}/" if below else ""
        by_name = {path.removeprefix(prefix): file for path, file in files.items() if path.startswith(prefix)}
        small = {name: by_name[name] for name in wanted.small_files(by_name, self._what, self._kind)}
        self._bring(small)
        self._look_at(small)
        named = wanted.index_file(by_name, self._kind)
        index = None if named is None else self._store.blob(small[named].key).read_bytes()
        weights = {
            name: by_name[name] for name in wanted.weight_files(by_name, index, self._what, self._kind)
        }
        return small, weights

    def _bring(self, files: Mapping[str, RemoteFile]) -> None:
        """Have them as blobs. What another tool left in the snapshot is not fetched again if it is right."""
        for name, file in files.items():
            if file.checksum is not None:
                self._store.take_over(self._listing.identity, name, file)
        self._transfer.bring(list(files.values()), self._what)

    def _look_at(self, small: Mapping[str, RemoteFile]) -> None:
        """Have `check` look at the small files under their names."""
        folder = self._store.path / OWN_FOLDER / f"small-{os.getpid()}"
        try:
            with self._store.writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for name, file in small.items():
                    shutil.copyfile(self._store.blob(file.key), folder / name)
            self._check(folder)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._what}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _unpacked(self) -> dict[str, RemoteFile]:
        """Bring all archives, and have what is wanted of them as blobs: path -> file."""
        self._transfer.bring(self._listing.archives, self._what)
        files: dict[str, RemoteFile] = {}
        for archive in self._listing.archives:
            blobs: dict[str, RemoteFile] = {}

            def place(path: str, of: RemoteFile = archive, into: dict[str, RemoteFile] = blobs) -> Path:
                # Named by the layer, whose digest was checked, and the path in it: always the same content.
                key = f"{of.key}-{hashlib.sha256(path.encode()).hexdigest()[:16]}"
                into[path] = RemoteFile(path, 0, key, of.locator, None)
                return self._store.partial(key)

            with self._store.writing(self._store.blob(archive.key)):
                contents = layers.take_out(
                    self._store.blob(archive.key), self._may_be_wanted, place, f"{self._what}: {archive.path}"
                )
            for hidden in contents.hidden:
                files = {path: file for path, file in files.items() if not is_below(path, hidden)}
            for path, num_bytes in contents.files.items():
                files[path] = replace(blobs[path], num_bytes=num_bytes)
                self._store.place(files[path])
                self._taken_out.append(files[path])
        return files

    def _may_be_wanted(self, path: str) -> bool:
        return is_below(path, self._listing.below) and wanted.may_be_wanted(path)


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or in it, at whichever depth; "" is the top."""
    return folder in ("", ".") or path == folder or path.startswith(folder + "/")
