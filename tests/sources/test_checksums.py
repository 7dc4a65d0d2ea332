"""Checksums as hubs, buckets and registries give them, against other ways to compute them."""

import base64
import hashlib
import random
import subprocess
import zlib
from pathlib import Path

import pytest

from headway_runtime.sources.checksums import Checksum, digest_for

CONTENT = random.Random(7).randbytes(300_007)


def computed(checksum: Checksum, piece: int) -> str:
    digest = digest_for(checksum, len(CONTENT))
    for start in range(0, len(CONTENT), piece):
        digest.update(CONTENT[start : start + piece])
    return digest.value()


@pytest.mark.parametrize("piece", [1000, 65536, 10**6])
def test_checksums_do_not_depend_on_how_bytes_come(piece: int) -> None:
    part = 100_000
    parts = [hashlib.md5(CONTENT[start : start + part]).digest() for start in range(0, len(CONTENT), part)]
    want = {
        Checksum("sha256", ""): hashlib.sha256(CONTENT).hexdigest(),
        Checksum("md5", ""): hashlib.md5(CONTENT).hexdigest(),
        Checksum("crc32", ""): base64.b64encode(zlib.crc32(CONTENT).to_bytes(4, "big")).decode(),
        Checksum("md5-parts", "", part): f"{hashlib.md5(b''.join(parts)).hexdigest()}-4",
    }
    assert {checksum: computed(checksum, piece) for checksum in want} == want


def test_the_hubs_small_files_are_named_as_git_names_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    git = subprocess.run(
        ["git", "hash-object", "file"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert computed(Checksum("git-sha1", ""), 65536) == git.stdout.strip()


@pytest.mark.parametrize(("part", "num_parts"), [(300_007, 1), (150_004, 2), (100_003, 3), (300_006, 2)])
def test_a_last_part_may_be_shorter_or_just_full(part: int, num_parts: int) -> None:
    assert computed(Checksum("md5-parts", "", part), 4096).endswith(f"-{num_parts}")
