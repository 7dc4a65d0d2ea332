"""Folders of engines that compute different numbers differ."""

import os
from pathlib import Path

import pytest

from headway_runtime.offload.identity import folder_name, weights_digest

PARTS = {"dtype": "bfloat16", "kv_dtype": "int8", "block_size": 16}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 1}')
    (folder / "a.safetensors").write_bytes(bytes(100))
    (folder / "b.safetensors").write_bytes(bytes(range(100)))
    return folder


def test_the_same_engine_gets_the_same_folder(model: Path, tmp_path: Path) -> None:
    assert folder_name(PARTS, model, tmp_path) == folder_name(dict(PARTS), model, tmp_path)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_tells_folders_apart(name: str, model: Path, tmp_path: Path) -> None:
    assert folder_name(PARTS | {name: "another"}, model, tmp_path) != folder_name(PARTS, model, tmp_path)


@pytest.mark.parametrize("file", ["config.json", "a.safetensors"])
def test_a_change_of_one_byte_tells_folders_apart(file: str, model: Path, tmp_path: Path) -> None:
    before = folder_name(PARTS, model, tmp_path)
    changed = bytearray((model / file).read_bytes())
    changed[7] ^= 1
    (model / file).write_bytes(changed)
    os.utime(model / file, (1.0, 1.0))
    assert folder_name(PARTS, model, tmp_path) != before


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_what_quantized_weights_mean_tells_folders_apart(file: str, model: Path, tmp_path: Path) -> None:
    without = folder_name(PARTS, model, tmp_path)
    (model / file).write_text('{"checkpoint_format": "gptq"}')
    old = folder_name(PARTS, model, tmp_path)
    (model / file).write_text('{"checkpoint_format": "gptq_v2"}')
    assert len({without, old, folder_name(PARTS, model, tmp_path)}) == 3


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    before = folder_name(PARTS, model, tmp_path)
    moved = tmp_path / "moved"
    model.rename(moved)
    for path in moved.iterdir():
        os.utime(path, (1.0, 1.0))
    assert folder_name(PARTS, moved, tmp_path) == before


def test_weights_are_read_once_as_long_as_they_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    first = weights_digest(model, tmp_path)
    notes = tmp_path / "weights.json"
    notes.write_text(notes.read_text().replace(first, "noted"))
    assert weights_digest(model, tmp_path) == "noted"
    os.utime(model / "a.safetensors", (1.0, 1.0))
    assert weights_digest(model, tmp_path) == first


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_notes_that_are_damaged_are_written_anew(text: str, model: Path, tmp_path: Path) -> None:
    first = weights_digest(model, tmp_path)
    (tmp_path / "weights.json").write_text(text)
    assert weights_digest(model, tmp_path) == first
