"""What a start gets from the system while PyTorch is imported."""

import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from headway_runtime import cleared_memory, head_start
from headway_runtime.cleared_memory import ClearedMemory
from headway_runtime.engine_options import EngineOptions, keyword_options
from headway_runtime.kernels.cpu.linear import PairsLinear
from headway_runtime.kernels.cpu.processor import multiplies_pairs
from headway_runtime.layers.linear import make_linear
from headway_runtime.memory import num_weights
from headway_runtime.model_config import read_model_config

MEGABYTE = 1 << 20

on_linux = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux alone")


@pytest.fixture(autouse=True)
def no_head_start_left() -> Iterator[None]:
    yield
    cleared_memory.give_back()


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors that pack no weights too."""
    monkeypatch.setattr(head_start, "weights_are_packed", lambda: True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_memory_is_zeros_that_are_nobody_elses() -> None:
    memory = ClearedMemory(64 * MEGABYTE, lambda: 1 << 40)
    taken = [memory.take(size) for size in (100, 30 * MEGABYTE + 1, 7)]
    for number, part in enumerate(taken, 1):
        assert part is not None
        tensor = torch.frombuffer(part, dtype=torch.uint8)
        assert tensor.data_ptr() % cleared_memory.ALIGNMENT == 0
        assert not tensor.any()
        tensor.fill_(number)
    for number, part in enumerate(taken, 1):
        assert part is not None
        assert set(bytes(part)) == {number}
    assert [len(part) for part in taken if part is not None] == [100, 30 * MEGABYTE + 1, 7]
    assert memory.take(40 * MEGABYTE) is None
    memory.give_back()
    assert memory.take(1) is None


@on_linux
def test_memory_is_there_before_it_is_taken_and_goes_back_if_it_is_not() -> None:
    before = resident_bytes()
    memory = ClearedMemory(256 * MEGABYTE, lambda: 1 << 40)
    until(lambda: resident_bytes() > before + 250 * MEGABYTE)
    kept = memory.take(64 * MEGABYTE)
    memory.give_back()
    assert before + 60 * MEGABYTE < resident_bytes() < before + 100 * MEGABYTE
    assert kept is not None
    assert not any(kept[:: mmap.PAGESIZE])


@on_linux
@pytest.mark.parametrize("wanted", [0, 100 * MEGABYTE])
def test_no_more_memory_is_cleared_than_is_wanted(wanted: int) -> None:
    before = resident_bytes()
    asked = threading.Event()

    def num_wanted() -> int:
        asked.set()
        return wanted

    memory = ClearedMemory(256 * MEGABYTE, num_wanted)
    until(lambda: asked.is_set() and "headway-head-start" not in {one.name for one in threading.enumerate()})
    assert memory.num_cleared == wanted
    assert resident_bytes() < before + wanted + 20 * MEGABYTE
    memory.give_back()


@on_linux
def test_files_are_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(8 * MEGABYTE))
    drop(path)
    if cached_bytes(path) > MEGABYTE:
        pytest.skip("this file system keeps its files in memory")
    head_start.read_ahead(tmp_path)
    until(lambda: cached_bytes(path) == 8 * MEGABYTE)
    head_start.read_ahead(tmp_path / "missing")


@on_linux
def test_no_other_files_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.safetensors", "consolidated.safetensors", "other.bin"):
        (tmp_path / name).write_bytes(b"weights")
    read = []

    def advise(file: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_WILLNEED)
        read.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    head_start.read_ahead(tmp_path)
    assert read == ["model.safetensors"]


def drop(path: Path) -> None:
    """From the page cache, as far as the system does; pages that it is busy with take a moment."""
    with path.open("rb") as file:
        for _ in range(100):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached_bytes(path) < MEGABYTE:
                return
            time.sleep(0.01)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache: what can be read without waiting for the disk."""
    with path.open("rb") as file:
        cached = 0
        for offset in range(0, path.stat().st_size, mmap.PAGESIZE):
            try:
                cached += os.preadv(file.fileno(), [bytearray(mmap.PAGESIZE)], offset, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
    return cached


@pytest.fixture
def options(write_config: Any) -> EngineOptions:
    return keyword_options(write_config(), {"device": "cpu", "dtype": "bfloat16"})


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize(
    "changes",
    [{"load_format": "dummy"}, {"device": "cuda"}, {"dtype": "float32"}, {"model_path": "/missing"}],
)
def test_there_is_no_head_start_where_nothing_is_packed(
    changes: dict[str, Any], options: EngineOptions
) -> None:
    head_start.begin(replace(options, **changes))
    assert cleared_memory.take(1) is None


@pytest.mark.usefixtures("packs")
def test_there_is_room_for_all_packed_weights_and_no_more(options: EngineOptions) -> None:
    num_bytes = 2 * num_weights(read_model_config(Path(options.model_path)))
    head_start.begin(options)
    assert cleared_memory.take(num_bytes + 1) is None
    assert cleared_memory.take(num_bytes) is not None
    assert cleared_memory.take(1) is None
    cleared_memory.give_back()


@pytest.mark.skipif(not multiplies_pairs(), reason="this processor packs no weights")
def test_weights_are_packed_into_the_memory_of_a_head_start(options: EngineOptions) -> None:
    x, weight = (torch.randn((rows, 32)).bfloat16() for rows in (3, 64))
    want = make_linear([weight])(x)
    num_bytes = 2 * num_weights(read_model_config(Path(options.model_path)))
    head_start.begin(options)
    linear = make_linear([weight])
    assert isinstance(linear, PairsLinear)
    assert cleared_memory.take(num_bytes - linear.weight.nbytes + 1) is None
    cleared_memory.give_back()
    assert torch.equal(linear(x), want)
