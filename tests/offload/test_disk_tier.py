"""Blocks in files: what is written is read again, what is damaged is a miss, and the limit holds."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headway_runtime.errors import ConfigError
from headway_runtime.offload import disk_tier
from headway_runtime.offload.block_file import HEADER_BYTES
from headway_runtime.offload.disk_folder import OLDEST_TEMPORARY_SECONDS, PAGE_BYTES, check_folder

if TYPE_CHECKING:
    from tests.offload.conftest import DiskBench

OpenDisk = Callable[..., "DiskBench"]
SIZE = 64
FILE_BYTES = PAGE_BYTES


def key(number: int) -> bytes:
    return bytes([number]) * 32


def contents(number: int) -> bytes:
    return bytes((number + index) % 251 for index in range(SIZE))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_what_is_written_is_read_again(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.put(key(1), contents(1))
    assert key(1) in disk.tier
    assert disk.get(key(1)) == contents(1)
    moved = disk.counters.snapshot().transfers
    assert (moved["host_to_disk"].num_blocks, moved["disk_to_host"].num_bytes) == (1, SIZE)
    assert disk.tier.seconds_to_read(2) == pytest.approx(2 * moved["disk_to_host"].seconds)


def test_files_are_their_owners_alone_to_read(open_disk: OpenDisk, tmp_path: Path) -> None:
    open_disk().put(key(1), contents(1))
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parents[1].stat().st_mode & 0o077 == 0


def test_another_tier_finds_what_an_earlier_one_wrote(open_disk: OpenDisk) -> None:
    open_disk().put(key(1), contents(1))
    assert open_disk().get(key(1)) == contents(1)


def test_a_folder_of_another_name_finds_nothing(open_disk: OpenDisk) -> None:
    open_disk().put(key(1), contents(1))
    other = open_disk(folder="headway-kv-" + "1" * 32)
    assert key(1) not in other.tier
    assert other.get(key(1)) is None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut in the header": lambda whole: whole[: HEADER_BYTES - 1],
    "cut in the contents": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"x",
    "a bit flipped": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "another format": lambda whole: b"X" + whole[1:],
    "another block's": lambda whole: whole[:8] + key(9) + whole[40:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_deleted(
    damage: str, open_disk: OpenDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_disk()
    disk.put(key(1), contents(1))
    (path,) = files(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert disk.get(key(1)) is None
    assert key(1) not in disk.tier
    assert not files(tmp_path)
    assert disk.counters.corrupt_blocks == 1
    assert path.name in caplog.text
    disk.put(key(1), contents(1))
    assert disk.get(key(1)) == contents(1), "written anew"


def test_a_file_that_another_engine_deleted_is_a_miss(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk()
    disk.put(key(1), contents(1))
    files(tmp_path)[0].unlink()
    assert disk.get(key(1)) is None
    assert key(1) not in disk.tier
    assert disk.counters.corrupt_blocks == 0


def test_the_longest_unused_make_room(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk(limit_bytes=3 * FILE_BYTES)
    for number in (1, 2, 3):
        disk.put(key(number), contents(number))
    assert disk.get(key(1)) == contents(1)
    disk.put(key(4), contents(4))
    assert [key(number) in disk.tier for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(files(tmp_path)) == 3
    held = disk.counters.snapshot().disk
    assert (held.held_blocks, held.held_bytes, held.evicted_blocks) == (3, 3 * FILE_BYTES, 1)


def test_the_order_of_use_and_a_lower_limit_hold_after_a_restart(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk()
    for number in (1, 2, 3):
        disk.put(key(number), contents(number))
    for age, number in enumerate((2, 1, 3)):  # the latest first
        (path,) = tmp_path.rglob(f"{key(number).hex()}.kv")
        os.utime(path, (time.time() - age * 100,) * 2)
    again = open_disk(limit_bytes=2 * FILE_BYTES)
    assert [key(number) in again.tier for number in (1, 2, 3)] == [True, True, False]
    assert len(files(tmp_path)) == 2


def test_what_engines_of_other_models_left_counts_and_goes_first(open_disk: OpenDisk, tmp_path: Path) -> None:
    open_disk(folder="headway-kv-" + "1" * 32).put(key(1), contents(1))
    os.utime(files(tmp_path)[0], (1.0, 1.0))
    disk = open_disk(limit_bytes=2 * FILE_BYTES)
    disk.put(key(2), contents(2))
    assert disk.counters.disk.held_bytes == 2 * FILE_BYTES
    assert disk.counters.disk.held_blocks == 1
    disk.put(key(3), contents(3))
    assert [path.stem for path in files(tmp_path)] == [key(2).hex(), key(3).hex()]


def test_nothing_else_in_the_folder_is_touched(open_disk: OpenDisk, tmp_path: Path) -> None:
    mine = [tmp_path / "notes.kv", tmp_path / "headway-kv-mine" / "aa" / "notes.kv"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10 * FILE_BYTES))
        os.utime(path, (1.0, 1.0))
    disk = open_disk(limit_bytes=FILE_BYTES)
    for number in (1, 2):
        disk.put(key(number), contents(number))
    disk.tier.reset()
    assert disk.tier.flush(30)
    assert files(tmp_path) == sorted(mine)


def test_a_block_larger_than_the_limit_is_not_written(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk(limit_bytes=FILE_BYTES - 1)
    disk.put(key(1), contents(1))
    assert key(1) not in disk.tier
    assert not files(tmp_path)


def test_half_written_files_of_a_crash_are_removed_when_they_are_old(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    open_disk().put(key(1), contents(1))
    folder = files(tmp_path)[0].parent
    old, young = folder / "a.kv.1.part", folder / "b.kv.2.part"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - OLDEST_TEMPORARY_SECONDS - 10,) * 2)
    open_disk()
    assert not old.exists()
    assert young.exists(), "another engine may be writing it"


def test_a_full_disk_switches_writing_off_with_one_warning(
    open_disk: OpenDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_disk()
    disk.put(key(1), contents(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_tier, "write_block", full)
    with caplog.at_level(logging.WARNING):
        for number in (2, 3, 4):
            disk.tier.write(key(number), number - 1)
            assert disk.tier.flush(30)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert disk.counters.unwritten_blocks == 1, "the others were not tried"
    assert disk.get(key(1)) == contents(1), "reading goes on"
    assert len(files(tmp_path)) == 1


def test_a_write_that_fails_leaves_nothing(open_disk: OpenDisk, tmp_path: Path) -> None:
    """A file's folder is a file: no test may rely on permissions, which root has none of."""
    disk = open_disk()
    (folder,) = tmp_path.iterdir()
    (folder / key(1).hex()[:2]).write_bytes(b"")
    disk.put(key(1), contents(1))
    assert key(1) not in disk.tier
    assert disk.counters.unwritten_blocks == 1
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".part"]


def test_a_slot_is_kept_while_it_is_written_and_not_while_it_waits_for_that(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.memory.may_go_on.clear()
    disk.tier.write(key(1), 0)
    disk.tier.write(key(2), 1)
    disk.wait_for_write()
    assert not disk.tier.let_go(0), "it is being written"
    assert disk.tier.let_go(1)
    assert disk.counters.unwritten_blocks == 1
    disk.memory.may_go_on.set()
    assert disk.tier.flush(30)
    assert disk.tier.let_go(0)
    assert (key(1) in disk.tier, key(2) in disk.tier) == (True, False)


def test_after_a_reset_nothing_is_found_that_was_there_or_on_its_way(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    disk = open_disk()
    disk.put(key(1), contents(1))
    disk.put(key(2), contents(2))
    assert disk.get(key(2)) == contents(2)
    disk.memory.may_go_on.clear()
    disk.tier.read(key(1), 1)
    disk.tier.write(key(3), 2)
    disk.tier.reset()
    disk.memory.may_go_on.set()
    assert [read.is_good for read in disk.reads(1)] == [False]
    assert disk.tier.flush(30)
    assert not any(key(number) in disk.tier for number in (1, 2, 3))
    assert not files(tmp_path)
    disk.put(key(1), contents(4))
    assert disk.get(key(1)) == contents(4), "the tier goes on"


def test_a_write_under_way_at_a_reset_is_not_found_afterwards(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk()
    disk.memory.may_go_on.clear()
    disk.tier.write(key(1), 0)
    disk.wait_for_write()
    disk.tier.reset()
    disk.memory.may_go_on.set()
    assert disk.tier.flush(30)
    assert key(1) not in disk.tier
    assert not files(tmp_path)


def test_a_read_done_before_a_reset_and_not_yet_taken_over_is_bad(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.put(key(1), contents(1))
    disk.tier.read(key(1), 1)
    assert disk.tier.flush(30)
    disk.tier.reset()
    assert [read.is_good for read in disk.tier.completed()] == [False]


def test_a_folder_that_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--kv-offloading-disk-path=.*file.*cannot be written"):
        check_folder(tmp_path / "file" / "below")


def test_closing_lets_what_is_to_be_written_be_written(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk()
    for number in range(4):
        disk.tier.write(key(number), number)
    disk.tier.close()
    assert len(files(tmp_path)) == 4
