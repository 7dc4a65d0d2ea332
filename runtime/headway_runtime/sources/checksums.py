"""The digests that hubs, buckets and registries give of a file, computed while its bytes arrive.

    sha256        what is in Git LFS on the Hub (its etag); every blob of a registry; some objects of S3
    git-sha1      what is in git itself on the Hub: of "blob SIZE\\0" and the content
    crc32         of S3, where an upload asked for it, as base64
    md5           the etag of an S3 object that came in one part and is not encrypted with a key of KMS
    md5-parts     the etag of one that came in parts of `part_bytes`: of the parts' digests, with their number

Source of the last two: "Checking object integrity" of the Amazon S3 user guide.
"""

import base64
import hashlib
import zlib
from dataclasses import dataclass
from typing import Literal, Protocol

Algorithm = Literal["sha256", "git-sha1", "crc32", "md5", "md5-parts"]


@dataclass(frozen=True, slots=True)
class Checksum:
    """What the bytes of a file must come to. part_bytes: of md5-parts alone."""

    algorithm: Algorithm
    value: str
    part_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.value}"


class Digest(Protocol):
    """A checksum that is being computed."""

    def update(self, data: bytes, /) -> object: ...
    def value(self) -> str: ...


def digest_for(checksum: Checksum, num_bytes: int) -> Digest:
    """What computes `checksum` of a file of that size."""
    match checksum.algorithm:
        case "sha256":
            return _Hashed("sha256")
        case "git-sha1":
            return _Hashed("sha1", b"blob %d\0" % num_bytes)
        case "md5":
            return _Hashed("md5")
        case "crc32":
            return _Crc32()
        case "md5-parts":
            return _Md5OfParts(checksum.part_bytes)


class _Hashed:
    def __init__(self, name: str, prefix: bytes = b"") -> None:
        # None of them keeps a secret: they find what was damaged on its way.
        self._hash = hashlib.new(name, prefix, usedforsecurity=False)

    def update(self, data: bytes, /) -> None:
        self._hash.update(data)

    def value(self) -> str:
        return self._hash.hexdigest()


class _Crc32:
    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes, /) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def value(self) -> str:
        return base64.b64encode(self._crc.to_bytes(4, "big")).decode()


class _Md5OfParts:
    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._left = part_bytes
        self._part = hashlib.md5(usedforsecurity=False)
        self._digests: list[bytes] = []

    def update(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            if not self._left:
                self._digests.append(self._part.digest())
                self._part = hashlib.md5(usedforsecurity=False)
                self._left = self._part_bytes
            piece, view = view[: self._left], view[self._left :]
            self._part.update(piece)
            self._left -= len(piece)

    def value(self) -> str:
        digests = [*self._digests, self._part.digest()]
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(digests)}"
