"""What `headway plan` reads and is told: files beside the config, and flags that cannot be."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.fit.plan_command import main


def test_files_beside_the_config_tell_their_size(
    fixture_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((fixture_folder("llama-3.2-1b") / "config.json").read_text())
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    assert main([str(tmp_path), "--gpu", "h200"]) == 0
    assert "1 safetensors file: 12 B" in capsys.readouterr().out
    for offsets, kept, complaint in (
        ([0, 12], 11, "bytes where its header tells of"),
        (["x", "y"], 12, "cannot be read"),
        ([0], 12, "cannot be read"),
    ):
        tensor = {"dtype": "F32", "shape": [3], "data_offsets": offsets}
        header = json.dumps({"lm_head.weight": tensor}).encode()
        content = struct.pack("<Q", len(header)) + header + bytes(kept)
        (tmp_path / "model.safetensors").write_bytes(content)
        assert main([str(tmp_path), "--gpu", "h200"]) == 2
        assert f"model.safetensors: {'has ' if kept < 12 else ''}" in (told := capsys.readouterr().err)
        assert complaint in told
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert main([str(tmp_path), "--gpu", "h200"]) == 2
    assert "model.safetensors: cannot be read" in capsys.readouterr().err


def test_a_shard_that_lacks_a_tensor_of_the_index_is_told(
    fixture_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((fixture_folder("llama-3.2-1b") / "config.json").read_text())
    header = json.dumps({"here": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"here": "a.safetensors", "gone": "a.safetensors"}}))
    assert main([str(tmp_path), "--gpu", "h200"]) == 2
    assert "a.safetensors: has no tensor 'gone', which the index puts there" in capsys.readouterr().err
    index.write_text(json.dumps({"weight_map": {"here": "a.safetensors"}}))
    assert main([str(tmp_path), "--gpu", "h200"]) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gpu", "h900"], "invalid choice: 'h900'"),
        (["--memory", "80 apples"], "is not a size"),
        (["--memory", "9" * 400], "is more bytes than systems count to"),
        (["--gpu", "l4", "--kv-offloading-size", "1e308"], "is out of range"),
        (["--gpu", "l4", "--device", "cpu"], "is no CPU"),
        (["--num-gpus", "2"], "give --gpu KIND or --memory SIZE"),
        (["--gpu", "l4", "--num-gpus", "3"], "num_attention_heads, 32, is no multiple of it"),
        (["--gpu", "l4", "--max-model-len", "200000"], "is more than the model's max_position_embeddings"),
        (["--gpu", "l4", "--max-model-len", "100", "--context", "101"], "--context=101 is more than"),
        (["--memory", "80Gi", "--price-per-gpu-hour", "2"], "give --gpu, or --bandwidth and --flops"),
        (["--memory", "80Gi", "--concurrency", "8"], "--concurrency=8 is for bounds of a kind of GPU"),
        (["--gpu", "l4", "--concurrency", "9", "--max-num-seqs", "8"], "is more than --max-num-seqs=8"),
        (["--memory", "80Gi", "--efficiency", "0.3"], "--efficiency=0.3 is for the cost"),
        (["--gpu", "l4", "--efficiency", "0.3"], "give --price-per-gpu-hour"),
        (["--gpu", "l4", "--flops", "9T"], "--flops=9000000000000: --gpu='l4' says it already"),
        (["--memory", "80Gi", "--bandwidth", "1T"], "--bandwidth=1000000000000: bounds need both"),
        (["--memory", "80Gi", "--bandwidth", "fast"], "is not a size"),
        (["--gpu", "l4", "--quantization", "awq"], "is not quantized"),
    ],
)
def test_bad_input_ends_with_2(
    flags: list[str], complaint: str, fixture_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(fixture_folder("llama-3.1-8b")), *flags]) == 2
    assert complaint in capsys.readouterr().err
