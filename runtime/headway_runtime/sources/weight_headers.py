"""Of remote weights their headers alone: what a plan needs to know, in a folder that nothing is loaded from.

A safetensors file begins with the length of its header and the header, which names every tensor with its type
and place. So much is read of each, and the connection closed. The folder lies beside the snapshots, not among
them: who wants the model itself never finds it. Nothing of it is compared with a checksum, which are of whole
files.
"""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headway_runtime.checkpoint_files import LENGTH_BYTES, LONGEST_HEADER
from headway_runtime.errors import ModelFetchError
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.remote import Remote, RemoteFile, TransientError
from headway_runtime.sources.store import OWN_FOLDER, Store
from headway_runtime.sources.transfer import NUM_FILES_AT_ONCE


def header_folder(store: Store, identity: str) -> Path:
    """Where they lie; it is there in full or not at all."""
    return store.path / OWN_FOLDER / f"headers-{identity}"


def bring_headers(
    store: Store,
    remote: Remote,
    patience: Patience,
    identity: str,
    what: str,
    small: Mapping[str, RemoteFile],
    weights: Mapping[str, RemoteFile],
) -> Path:
    """The folder, with the small files, which are in the store, and the weights' beginnings."""
    folder = header_folder(store, identity)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")

    def bring(name: str) -> None:
        where = f"{what}: {name}"
        try:
            content = patience.ask(lambda: _header(remote, weights[name], where), where)
        except TransientError as error:
            raise ModelFetchError(f"{where}: {error}; {patience.given_up(where)}") from error
        with store.writing(aside):
            (aside / name).write_bytes(content)

    try:
        with store.writing(aside):
            aside.mkdir(parents=True, exist_ok=True)
            for name, file in small.items():
                shutil.copyfile(store.blob(file.key), aside / name)
        with ThreadPoolExecutor(NUM_FILES_AT_ONCE, "headway-headers") as pool:
            for _ in pool.map(bring, sorted(weights)):
                pass
        with store.writing(folder):
            os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _header(remote: Remote, file: RemoteFile, where: str) -> bytes:
    """The file's first bytes, to the end of its header."""
    content = bytearray()
    with remote.open(file, 0) as stream:
        for chunk in stream.chunks:
            content += chunk
            if len(content) >= LENGTH_BYTES:
                wanted = LENGTH_BYTES + _length(content, file, where)
                if len(content) >= wanted:
                    header = bytes(content[:wanted])
                    _check_size(header, file, where)
                    return header
    if len(content) < file.num_bytes:
        raise TransientError(f"it ended after {len(content)} of {file.num_bytes} bytes")
    raise ModelFetchError(
        f"{where}: its {len(content)} bytes hold no header; its owner has to upload it again"
    )


def _length(content: bytearray, file: RemoteFile, where: str) -> int:
    (length,) = struct.unpack_from("<Q", content)
    if length > min(LONGEST_HEADER, file.num_bytes - LENGTH_BYTES):
        raise ModelFetchError(
            f"{where}: is no safetensors file, by its first bytes its header has {length} bytes; its owner "
            "has to upload it again"
        )
    return int(length)


def _check_size(header: bytes, file: RemoteFile, where: str) -> None:
    """ModelFetchError for a file that is shorter than its header says.

    What else is wrong with it is told by who reads it.
    """
    try:
        tensors = json.loads(header[LENGTH_BYTES:])
        ends = [int(one["data_offsets"][1]) for name, one in tensors.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError):
        return
    wanted = len(header) + max(ends, default=0)
    if file.num_bytes < wanted:
        raise ModelFetchError(
            f"{where}: has {file.num_bytes} bytes where its header tells of {wanted}: it was cut off; its "
            "owner has to upload it again"
        )
