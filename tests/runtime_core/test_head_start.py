"""What a start gets from the system while PyTorch is imported."""

import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from headway_runtime import head_start
from headway_runtime.engine_options import EngineOptions, keyword_options
from headway_runtime.kernels.cpu.linear import PairsLinear
from headway_runtime.kernels.cpu.processor import has_features
from headway_runtime.layers.linear import make_linear
from headway_runtime.memory import num_weights
from headway_runtime.model_config import read_model_config

MEGABYTE = 1 << 20

on_linux = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux alone")


@pytest.fixture(autouse=True)
def no_head_start_left() -> Iterator[None]:
    yield
    head_start.end()


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors that pack no weights too."""
    monkeypatch.setattr(head_start, "_weights_are_packed", lambda: True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.usefixtures("packs")
def test_memory_is_zeros_that_are_nobody_elses() -> None:
    memory = head_start.ClearedMemory(64 * MEGABYTE)
    taken = [memory.take(size) for size in (100, 30 * MEGABYTE + 1, 7)]
    for number, part in enumerate(taken, 1):
        assert part is not None
        tensor = torch.frombuffer(part, dtype=torch.uint8)
        assert tensor.data_ptr() % head_start.ALIGNMENT == 0
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
@pytest.mark.usefixtures("packs")
def test_memory_is_there_before_it_is_taken_and_goes_back_if_it_is_not() -> None:
    before = resident_bytes()
    memory = head_start.ClearedMemory(256 * MEGABYTE)
    until(lambda: resident_bytes() > before + 250 * MEGABYTE)
    kept = memory.take(64 * MEGABYTE)
    memory.give_back()
    assert before + 60 * MEGABYTE < resident_bytes() < before + 100 * MEGABYTE
    assert kept is not None
    assert not any(kept[:: mmap.PAGESIZE])


@on_linux
def test_processors_that_pack_no_weights_get_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "_weights_are_packed", lambda: False)
    before = resident_bytes()
    memory = head_start.ClearedMemory(256 * MEGABYTE)
    memory.give_back()
    assert resident_bytes() < before + 20 * MEGABYTE


@on_linux
def test_files_are_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(8 * MEGABYTE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(path) > MEGABYTE:
            pytest.skip("this file system keeps its files in memory")
    head_start.read_ahead([tmp_path / "missing", path])
    until(lambda: cached_bytes(path) == 8 * MEGABYTE)


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
    assert head_start.take(1) is None


@pytest.mark.usefixtures("packs")
def test_there_is_room_for_all_packed_weights_and_no_more(options: EngineOptions) -> None:
    num_bytes = 2 * num_weights(read_model_config(Path(options.model_path)))
    head_start.begin(options)
    assert head_start.take(num_bytes + 1) is None
    assert head_start.take(num_bytes) is not None
    assert head_start.take(1) is None
    head_start.end()


@pytest.mark.skipif(
    not has_features("avx512bf16"), reason="this processor does not multiply pairs of bfloat16"
)
def test_weights_are_packed_into_the_memory_of_a_head_start(options: EngineOptions) -> None:
    x, weight = (torch.randn((rows, 32)).bfloat16() for rows in (3, 64))
    want = make_linear([weight])(x)
    num_bytes = 2 * num_weights(read_model_config(Path(options.model_path)))
    head_start.begin(options)
    linear = make_linear([weight])
    assert isinstance(linear, PairsLinear)
    assert head_start.take(num_bytes - linear.weight.nbytes + 1) is None
    head_start.end()
    assert torch.equal(linear(x), want)
