"""Checkpoints that do not hold what their configuration says, or more: each is refused, by name."""

from typing import Any

import pytest
import torch
from tests.quantization.sound_checkpoints import AWQ, DOWN, GPTQ, KINDS

from headway_runtime.errors import ModelLoadError


def test_files_named_as_autogptq_names_them_are_found(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(GPTQ, packers["gptq"](32))
    single = written.folder / "model.safetensors"
    single.rename(written.folder / "gptq_model-4bit-32g.safetensors")
    start_runner(written.folder)
    (written.folder / "gptq_model-8bit--1g.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError) as caught:
        start_runner(written.folder)
    told = "holds 'gptq_model-4bit-32g.safetensors' and 'gptq_model-8bit--1g.safetensors', each of which may"
    assert told in str(caught.value)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_groups_that_do_not_divide_the_inputs_are_refused(
    kind: str, write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    config, packer, _, options = KINDS[kind]
    written = write_checkpoint(config, packers[packer](32, **options))
    text = (written.folder / "config.json").read_text().replace('"group_size": 32', '"group_size": 48')
    (written.folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"its 128 inputs are no multiple of group_size=48") as caught:
        start_runner(written.folder)
    assert "q_proj" in str(caught.value)


def test_zero_points_that_the_configuration_denies_are_refused(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(AWQ | {"zero_point": False}, packers["awq"](32))
    with pytest.raises(ModelLoadError, match=r"qzeros' holds zero points, though .*zero_point=false"):
        start_runner(written.folder)


def test_truncated_shard_is_named(write_checkpoint: Any, packers: Any, start_runner: Any) -> None:
    written = write_checkpoint(GPTQ, packers["gptq"](32))
    path = written.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    left = path.stat().st_size
    told = rf"has {left} bytes where its header tells of {left + 4096}: .* copy the checkpoint again"
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {told}"):
        start_runner(written.folder)


def test_quantized_weights_without_a_configuration_are_refused(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(None, packers["integers"]("channel"))
    with pytest.raises(ModelLoadError, match=r"is torch\.int8, want .*has no quantization_config for that"):
        start_runner(written.folder)
    written = write_checkpoint(None, packers["gptq"](32))
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight' is in no file"):
        start_runner(written.folder)


def test_bias_that_is_not_zero_has_no_place(
    write_checkpoint: Any, packers: Any, change_tensors: Any, start_runner: Any
) -> None:
    written = write_checkpoint(GPTQ, packers["gptq"](32))
    change_tensors(written.folder, lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(128)}))
    with pytest.raises(ModelLoadError, match=rf"no place in this model, first '{DOWN}\.bias'"):
        start_runner(written.folder)
