"""Tensors that are read in pieces by threads are those that safetensors reads."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.weight_cuts import ALL, Part
from headway_runtime.parallel.share import Range
from headway_runtime.start_timeline import StartTimeline
from headway_runtime.weight_stream import lanes as lanes_module
from headway_runtime.weight_stream import streamed_files
from headway_runtime.weight_stream.lanes import Bytes, Lanes, Ordering
from headway_runtime.weight_stream.streamed_files import StreamedFiles
from headway_runtime.weight_stream.tensor_files import MappedFiles

CPU = torch.device("cpu")
PIECE_BYTES = 1000


class Point:
    """A point in the work of a device that copies when it is waited for, and not before."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()

    def wait(self) -> None:
        # Who comes while another one has it done waits until it is.
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                work()


class LateLane:
    """Copies as late as a device may: when its buffer is used again, or somebody waits."""

    def __init__(self) -> None:
        self._buffers = [bytearray(PIECE_BYTES), bytearray(PIECE_BYTES)]
        self._points: list[Point | None] = [None, None]
        self._turn = 0

    def buffer(self) -> Bytes:
        import numpy

        self._turn = 1 - self._turn
        point = self._points[self._turn]
        if point is not None:
            point.wait()
        return numpy.frombuffer(self._buffers[self._turn], dtype=numpy.uint8)

    def send(self, piece: Bytes, target: Tensor, after: Ordering | None) -> Ordering | None:
        def copy() -> None:
            with torch.inference_mode():
                if after is not None:
                    after.wait()
                target.copy_(torch.from_numpy(piece))

        point = self._points[self._turn] = Point(copy)
        return point


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lanes_module, streamed_files):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of all kinds, sizes from nothing to many pieces, for three layers."""
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.randn(77, 60).bfloat16(),
        "one": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "flags": torch.rand(33) < 0.5,
    }
    for layer in range(3):
        name = f"model.layers.{layer}"
        found[f"{name}.q.weight"] = torch.randn(41, 30)
        found[f"{name}.o.weight"] = torch.randn(48, 64).half()
        found[f"{name}.norm.weight"] = torch.randn(64)
        found[f"{name}.codes"] = torch.randint(0, 256, (50, 37), dtype=torch.uint8)
        found[f"{name}.fp8"] = torch.randn(20, 48).to(torch.float8_e4m3fn)
        for expert in range(2):
            found[f"{name}.experts.{expert}.up"] = torch.randint(-9, 9, (9, 13), dtype=torch.int32)
    return found


@pytest.fixture
def paths(tmp_path: Path, tensors: dict[str, Tensor]) -> list[Path]:
    """Two files, whose tensors are mixed."""
    names = sorted(tensors)
    made = []
    for number in range(2):
        made.append(tmp_path / f"{number}.safetensors")
        save_file({name: tensors[name].contiguous() for name in names[number::2]}, made[-1])
    return made


@pytest.fixture
def open_files(paths: list[Path]) -> Iterator[Callable[..., StreamedFiles]]:
    opened: list[StreamedFiles] = []

    def make(ahead_bytes: int = 1 << 20) -> StreamedFiles:
        files = StreamedFiles(paths, CPU, Lanes(LateLane, 3), lambda: None, ahead_bytes=ahead_bytes)
        opened.append(files)
        return files

    yield make
    for one in opened:
        one.close()


def same(got: Tensor, want: Tensor) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("ahead_bytes", [0, 6000, 1 << 20])
def test_whole_tensors_are_as_they_were_saved(
    ahead_bytes: int,
    tensors: dict[str, Tensor],
    paths: list[Path],
    open_files: Callable[..., StreamedFiles],
) -> None:
    files, mapped = open_files(ahead_bytes), MappedFiles(paths, CPU)

    assert files.places == mapped.places
    for name, want in tensors.items():
        assert same(files.read(name), want), name
        assert files.shape_of(name) == mapped.shape_of(name)
        assert files.dtype_of(name) == mapped.dtype_of(name)


PARTS = {
    "first rows": Part(rows=Range(0, 20)),
    "rows": Part(rows=Range(7, 19)),
    "no rows": Part(rows=Range(20, 20)),
    "columns": Part(columns=Range(8, 24)),
    "last columns": Part(columns=Range(17, 30)),
    "all columns": Part(columns=Range(0, 30)),
}


@pytest.mark.parametrize("name", list(PARTS))
def test_parts_are_those_of_the_whole(
    name: str, tensors: dict[str, Tensor], paths: list[Path], open_files: Callable[..., StreamedFiles]
) -> None:
    files, mapped, part = open_files(), MappedFiles(paths, CPU), PARTS[name]

    for layer in range(3):
        for kind in ("q.weight", "o.weight", "codes", "fp8"):
            own = f"model.layers.{layer}.{kind}"
            assert same(files.read(own, part), mapped.read(own, part)), own


def test_the_next_layers_tensors_come_ahead_and_no_more_than_there_is_room_for(
    tensors: dict[str, Tensor], open_files: Callable[..., StreamedFiles]
) -> None:
    files = open_files(ahead_bytes=41 * 30 * 4 + 100)
    files.read("model.embed_tokens.weight")
    assert not files._ahead
    files.read("model.layers.0.q.weight")
    files.read("model.layers.0.o.weight")
    files.read("model.layers.0.norm.weight")

    assert list(files._ahead) == ["model.layers.1.q.weight"]

    assert same(files.read("model.layers.1.q.weight"), tensors["model.layers.1.q.weight"])
    assert list(files._ahead) == ["model.layers.2.q.weight"]
    files.read("model.layers.2.q.weight")
    assert not files._ahead
    assert files._ahead_bytes == 0


def test_another_part_than_in_the_layer_before_is_read_anew(
    tensors: dict[str, Tensor], open_files: Callable[..., StreamedFiles]
) -> None:
    files = open_files()
    files.read("model.layers.0.q.weight", Part(rows=Range(0, 10)))

    assert same(files.read("model.layers.1.q.weight", ALL), tensors["model.layers.1.q.weight"])
    assert same(files.read("model.layers.2.q.weight", ALL), tensors["model.layers.2.q.weight"])


def test_what_came_ahead_and_nobody_took_is_let_go_of(open_files: Callable[..., StreamedFiles]) -> None:
    files = open_files()
    files.read("model.layers.0.q.weight")
    files.close()

    assert not files._ahead


@pytest.mark.parametrize("cut", ["in the header", "in the numbers"])
def test_a_file_that_is_cut_is_refused(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"one": torch.randn(100, 100)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:20] if cut == "in the header" else whole[:-1])

    with pytest.raises(ModelLoadError, match=r"cut\.safetensors: cannot be read .*copy the checkpoint again"):
        StreamedFiles([path], CPU, Lanes(LateLane, 1), lambda: None)


def test_a_header_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lies.safetensors"
    header = json.dumps({"one": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))

    with pytest.raises(ModelLoadError, match="8 bytes for F32"):
        StreamedFiles([path], CPU, Lanes(LateLane, 1), lambda: None)


@pytest.mark.parametrize("part", [ALL, Part(columns=Range(0, 5))])
def test_a_file_that_becomes_shorter_while_it_is_read_is_told(part: Part, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.safetensors"
    save_file({"one": torch.randn(100, 100)}, path)
    files = StreamedFiles([path], CPU, Lanes(LateLane, 1), lambda: None)
    with path.open("r+b") as file:
        file.truncate(5000)

    with pytest.raises(ModelLoadError, match=r"shrinks\.safetensors: cannot be read .it ends"):
        files.read("one", part)
    files.close()


def test_a_type_that_is_not_known_is_told_when_it_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    header = json.dumps({"one": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    files = StreamedFiles([path], CPU, Lanes(LateLane, 1), lambda: None)

    assert files.dtype_of("one") == "F4"
    with pytest.raises(ModelLoadError, match="holds a tensor of 'F4'"):
        files.read("one")
    files.close()


def test_the_timeline_hears_of_reads_copies_and_the_rest(
    tensors: dict[str, Tensor], open_files: Callable[..., StreamedFiles]
) -> None:
    files = open_files()
    timeline = StartTimeline()
    for name in tensors:
        files.read(name)

    files.tell(timeline)

    assert set(timeline.seconds) == {"read", "copy", "repack"}
    assert timeline.num_bytes["read"] == sum(one.nbytes for one in tensors.values())
    assert all(seconds >= 0 for seconds in timeline.seconds.values())
