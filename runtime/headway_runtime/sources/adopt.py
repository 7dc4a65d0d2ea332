"""Models that other tools left in the Hub's cache, where nobody can be asked what belongs to them.

Their own index says which files they need, and the names of their blobs, which are etags, what the content of
each must come to. So a snapshot that is complete and right is told from the rest of an interrupted download.
What they do not name, such as a tokenizer, may be missing all the same: what is found here is marked as
adopted, and whoever can ask asks. Nothing but our own notes is written: the snapshot stays as it is.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from headway_runtime.errors import ModelFetchError
from headway_runtime.sources import wanted
from headway_runtime.sources.checksums import Checksum, digest_for
from headway_runtime.sources.reference import HubModel, RemoteModel
from headway_runtime.sources.remote import RemoteFile
from headway_runtime.sources.store import Store, is_same
from headway_runtime.sources.transfer import READ_BYTES, Watcher

logger = logging.getLogger(__name__)


def offline(model: RemoteModel, store: Store, watcher: Watcher, kind: wanted.Kind = wanted.MODEL) -> Path:
    """What is cached of `model`, complete. ModelFetchError where it is not all there, or not right."""
    identity = model.pinned or store.known(model.ref)
    folder = store.complete(identity, or_adopted=True) if identity else None
    if folder is None and identity and isinstance(model, HubModel) and store.snapshot(identity).is_dir():
        folder = _adopt(model, identity, store, watcher, kind)
    if folder is None:
        raise ModelFetchError(
            f"{model}: is not in {str(store.path)!r}, and this process is told to stay offline; fetch it "
            f"once where there is a network: headway fetch {model}"
        )
    return folder


def _adopt(model: HubModel, identity: str, store: Store, watcher: Watcher, kind: wanted.Kind) -> Path:
    what, folder = str(model), store.snapshot(identity)
    names = {path.name: path for path in folder.iterdir() if path.is_file()}
    small = wanted.small_files(names, what, kind)
    named = wanted.index_file(names, kind)
    index = None if named is None else names[named].read_bytes()
    weights = wanted.weight_files(names, index, what, kind)
    files = {name: _described(names[name]) for name in (*small, *weights)}
    _compare(files, names, what, watcher)
    try:
        for name, file in files.items():
            if file.checksum is not None and is_same(names[name], store.blob(file.key)):
                store.keep(file)
        store.note(identity, what, files, is_adopted=True)
    except ModelFetchError as error:
        logger.info("%s: was compared with its checksums, which cannot be noted (%s)", what, error)
    return folder


def _described(path: Path) -> RemoteFile:
    """What the name of the blob that `path` is a link to says of its content; a file itself says nothing."""
    key = Path(os.readlink(path)).name if path.is_symlink() else path.name
    checksum = None
    if re.fullmatch("[0-9a-f]{64}", key):
        checksum = Checksum("sha256", key)
    elif re.fullmatch("[0-9a-f]{40}", key):
        checksum = Checksum("git-sha1", key)
    return RemoteFile(path.name, path.stat().st_size, key, path.name, checksum)


def _compare(files: Mapping[str, RemoteFile], paths: Mapping[str, Path], what: str, watcher: Watcher) -> None:
    watcher.expect(sum(file.num_bytes for file in files.values()), len(files))
    for name, file in files.items():
        digest = None if file.checksum is None else digest_for(file.checksum, file.num_bytes)
        with paths[name].open("rb", buffering=0) as opened:
            while chunk := opened.read(READ_BYTES):
                if digest is not None:
                    digest.update(chunk)
                watcher.arrived(len(chunk))
        if digest is not None and file.checksum is not None and digest.value() != file.checksum.value:
            raise ModelFetchError(
                f"{what}: {paths[name]} is not what its name says; remove it and fetch it again, with a "
                "network"
            )
        watcher.file_done()
