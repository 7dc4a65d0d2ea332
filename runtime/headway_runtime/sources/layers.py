"""Takes a model's files out of the layers of an image or artifact: tar, plain or packed with gzip or zstd.

Files are taken by name, as regular files, into places that the caller gives; nothing else of an archive
reaches the disk: no links, owners, modes or paths. Whiteouts hide what lower layers have, as the OCI image
specification ("Representing changes") says.
"""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from headway_runtime.errors import ModelFetchError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
COPY_BYTES = 1 << 20
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"


@dataclass(slots=True)
class Contents:
    """What one layer changes.

    files: path -> size; hidden: paths and folders of lower layers that are gone.
    """

    files: dict[str, int] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)


def take_out(
    archive: Path, is_wanted: Callable[[str], bool], place: Callable[[str], Path], what: str
) -> Contents:
    """Write each file of `archive` that is wanted to where `place` says.

    ModelFetchError if it cannot be read.
    """
    contents = Contents()
    links: list[str] = []
    try:
        with _unpacked(archive, what) as stream, tarfile.open(fileobj=stream, mode="r|") as opened:
            for member in opened:
                path = _normal(member.name)
                if path is None:
                    continue
                name = PurePosixPath(path).name
                if name == OPAQUE:
                    contents.hidden.append(str(PurePosixPath(path).parent))
                elif name.startswith(WHITEOUT):
                    contents.hidden.append(str(PurePosixPath(path).with_name(name.removeprefix(WHITEOUT))))
                elif is_wanted(path) and (member.issym() or member.islnk()):
                    links.append(f"{path} -> {member.linkname}")
                elif is_wanted(path) and member.isreg():
                    source = opened.extractfile(member)
                    assert source is not None, "a regular file has content"
                    contents.files[path] = _copy(cast("BinaryIO", source), place(path), member.size)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ValueError) as error:
        raise ModelFetchError(
            f"{what}: the layer is no tar archive that can be read ({error}); build and push the image again"
        ) from error
    if links:
        raise ModelFetchError(
            f"{what}: {links[0]} is a link; build the image with the files themselves in it (cp -L)"
        )
    return contents


def _copy(source: BinaryIO, target: Path, num_bytes: int) -> int:
    copied = 0
    with target.open("wb") as opened:
        while chunk := source.read(COPY_BYTES):
            opened.write(chunk)
            copied += len(chunk)
    if copied != num_bytes:
        raise EOFError(f"{target.name} ends after {copied} of {num_bytes} bytes")
    return copied


def _normal(name: str) -> str | None:
    """A path without "./" before it; None for one that leaves its root."""
    path = PurePosixPath("/", name).relative_to("/")
    return None if ".." in path.parts or not path.parts else str(path)


@contextmanager
def _unpacked(archive: Path, what: str) -> Iterator[BinaryIO]:
    """The tar in it. By its first bytes: media types say less than they should.

    ModelFetchError for what zstd cannot unpack, while it is read.
    """
    with archive.open("rb") as opened:
        magic = opened.read(4)
        opened.seek(0)
        if magic.startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=opened) as unpacked:
                yield cast("BinaryIO", unpacked)
        elif magic == ZSTD_MAGIC:
            import zstandard

            try:
                with zstandard.ZstdDecompressor().stream_reader(opened, read_across_frames=True) as reader:
                    yield cast("BinaryIO", reader)
            except zstandard.ZstdError as error:
                raise ModelFetchError(
                    f"{what}: zstd cannot unpack the layer ({error}); pack it with gzip, or with zstd "
                    "and no window above --long=27, and push it again"
                ) from error
        else:
            yield opened
