"""The flags, and those that make no sense together."""

from pathlib import Path
from typing import Any

import pytest

from headway_runtime.config import OffloadConfig
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import ConfigError
from headway_runtime.server.options import parse_options

GIB = 2**30


def test_nothing_is_offloaded_unless_it_is_asked_for(model_folder: Path) -> None:
    assert parse_options([str(model_folder)]).engine.offload is None


def test_sizes_are_gib_as_vllm_has_them(model_folder: Path, tmp_path: Path) -> None:
    flags = ["--kv-offloading-size", "1.5"]
    assert parse_options([str(model_folder), *flags]).engine.offload == OffloadConfig(GIB * 3 // 2)
    flags += ["--kv-offloading-disk-path", str(tmp_path), "--kv-offloading-disk-size", "20"]
    want = OffloadConfig(GIB * 3 // 2, str(tmp_path), 20 * GIB)
    assert parse_options([str(model_folder), *flags]).engine.offload == want


def test_a_relative_folder_is_the_same_for_the_engine_process(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = keyword_options(
        model_folder,
        {"kv_offloading_size": 1, "kv_offloading_disk_path": "kv", "kv_offloading_disk_size": 2},
    )
    assert options.offload is not None
    assert options.offload.disk_path == str(tmp_path / "kv")


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"kv_offloading_disk_path": "/x"}, r"disk-path='/x': .* give --kv-offloading-size"),
        ({"kv_offloading_disk_size": 1.0}, r"disk-size=1.0: .* give --kv-offloading-size"),
        (
            {"kv_offloading_size": 1, "kv_offloading_disk_path": "/x"},
            r"disk-path='/x': give --kv-offloading-disk-size",
        ),
        (
            {"kv_offloading_size": 1, "kv_offloading_disk_size": 2.0},
            r"disk-size=2.0: give --kv-offloading-disk-path",
        ),
        (
            {"kv_offloading_size": 1, "enable_prefix_caching": False},
            "--kv-offloading-size=1.0: without the prefix cache .* --no-enable-prefix-caching",
        ),
        (
            {
                "kv_offloading_size": 1,
                "kv_offloading_disk_path": "/x",
                "kv_offloading_disk_size": 2.0,
                "tensor_parallel_size": 2,
            },
            "disk-path='/x': 2 ranks could lose .* --tensor-parallel-size 1",
        ),
        ({"kv_offloading_size": 0}, "kv_offloading_size=0: '0' is out of range; give a number above 0"),
        ({"kv_offloading_size": "8Gi"}, "kv_offloading_size='8Gi': '8Gi' is not a number"),
    ],
)
def test_flags_that_make_no_sense_are_named_with_a_remedy(
    keywords: dict[str, Any], words: str, model_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        keyword_options(model_folder, keywords)
