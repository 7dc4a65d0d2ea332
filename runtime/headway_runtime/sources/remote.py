"""What the kinds of remote source have in common: they list files and give their bytes from an offset on.

Holds the values that pass between them and those who fetch, and nothing that speaks to a network.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from headway_runtime.sources.checksums import Checksum

# For a connection to be made, and for the next bytes of one that is.
CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0


class TransientError(Exception):
    """It may go better the next time. retry_after_seconds: what the other side asks for, if it does."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. path: as the source names it. key: names its content, and its blob in the cache.

    locator: what the source needs to find it. checksum: None where the source gives none that can be checked.
    """

    path: str
    num_bytes: int
    key: str
    locator: str
    checksum: Checksum | None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source holds now. identity: of all its content together; names its folder in the cache.

    archives: files (tar) that hold files of the model, those that come later on top of those before.
    below: the folder in which the model lies. is_nested: it may also lie in a folder of that one.
    """

    identity: str
    files: tuple[RemoteFile, ...]
    archives: tuple[RemoteFile, ...] = ()
    below: str = ""
    is_nested: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes of a file. offset: where they begin, which is 0 where the source cannot begin elsewhere."""

    offset: int
    chunks: Iterator[bytes]


class Remote(Protocol):
    """A source that is elsewhere. Both raise ModelFetchError for what is final, TransientError else."""

    def listing(self) -> Listing: ...
    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[Stream]: ...
    def close(self) -> None: ...
