"""Sources, config.json and safetensors: what is understood, and that everything else is refused by name."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_runtime.errors import ConfigError, ModelLoadError
from headway_runtime.model_config import read_model_config
from headway_runtime.model_config_rope import LinearRope, Llama3Rope, Rope
from headway_runtime.sources import bundled_names, resolve

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WriteConfig = Callable[..., Path]


def test_source_may_be_a_path_or_a_file_url(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config()
    spaced = folder / "with space"
    spaced.mkdir()
    (folder / "config.json").rename(spaced / "config.json")
    assert resolve(str(spaced)) == spaced
    assert resolve(f"file://{folder}/with%20space") == spaced
    monkeypatch.chdir(folder)
    assert resolve("with space") == spaced


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_source_is_a_folder_of_the_package(name: str) -> None:
    assert (resolve(f"bundled://{name}") / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("gs://bucket/model", "scheme 'gs' is not supported; use bundled://NAME"),
        ("bundled://other", "not bundled here; bundled models:"),
        ("bundled://../bundled", "not bundled here"),
        ("file://host/folder", "file:///absolute/folder"),
        ("file:///nowhere/at/all", "no config.json in '/nowhere/at/all'"),
        ("/nowhere/at/all", "no config.json"),
    ],
)
def test_source_that_is_no_model_is_refused(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(source)
    assert complaint in str(caught.value)
    assert repr(source) in str(caught.value) or source in str(caught.value)


def test_config_defaults_follow_transformers(write_config: WriteConfig) -> None:
    folder = write_config(num_key_value_heads=None, rms_norm_eps=None, dtype=None, eos_token_id=None)
    config = read_model_config(folder)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.rms_norm_eps, config.ropes, config.dtype) == (1e-6, (Rope(10000.0, None),), "float32")
    assert (config.tie_word_embeddings, config.has_qkv_bias, config.has_output_bias) == (False, False, False)
    assert (config.has_mlp_bias, config.eos_token_ids) == (False, frozenset())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, id="transformers 5"),
        pytest.param({"rope_scaling": LLAMA3, "rope_theta": 5e5}, id="transformers 4"),
        pytest.param(
            {
                "rope_scaling": {"type" if key == "rope_type" else key: LLAMA3[key] for key in LLAMA3},
                "rope_theta": 5e5,
            },
            id="older still",
        ),
    ],
)
def test_rope_is_read_in_old_and_new_spelling(fields: dict[str, Any], write_config: WriteConfig) -> None:
    config = read_model_config(write_config(**fields))
    assert config.ropes == (Rope(5e5, Llama3Rope(8.0, 1.0, 4.0, 8192)),)


def test_linear_rope_and_old_dtype_are_read(write_config: WriteConfig) -> None:
    config = read_model_config(
        write_config(rope_scaling={"type": "linear", "factor": 2}, torch_dtype="bfloat16", dtype=None)
    )
    assert config.ropes == (Rope(10000.0, LinearRope(2.0)),)
    assert config.dtype == "bfloat16"


def test_end_of_sequence_ids_of_both_files_count(write_config: WriteConfig) -> None:
    folder = write_config(eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7]}))
    assert read_model_config(folder).eos_token_ids == {2, 5, 7}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures=['MambaForCausalLM']: supported are Llama"),
        ({"architectures": None}, "architectures=None"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling: type='su'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters: rope_type='mrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor=None"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor=0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"hidden_size": "32"}, "hidden_size='32': want a positive integer"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: num_attention_heads (4) must be a multiple"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id=['</s>']"),
    ],
)
def test_what_would_change_results_is_refused_by_name(
    fields: dict[str, Any], complaint: str, write_config: WriteConfig
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_model_config(write_config(**fields))
    assert complaint in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_damaged_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.fixture
def copied(checkpoint: Any, tmp_path: Path) -> Path:
    """A copy of a checkpoint whose files may be changed."""
    for path in checkpoint("mha, untied").folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def tokens_of(start_engine: Any, folder: Path, **changes: Any) -> list[int]:
    driver = start_engine(folder, **changes)
    driver.add("a", range(10, 30), temperature=0.0, max_tokens=16)
    driver.run()
    tokens: list[int] = driver.tokens("a")
    return tokens


@pytest.fixture
def sharded(copied: Path) -> Callable[..., dict[str, Any]]:
    """sharded(change, index_change): the model in two shards, changed before they are written; its index."""

    def write(
        change: Callable[[dict[str, dict[str, torch.Tensor]]], object] = lambda shards: None,
        index_change: Callable[[dict[str, str]], object] = lambda weight_map: None,
    ) -> dict[str, str]:
        tensors = load_file(copied / "model.safetensors")
        names = sorted(tensors)
        shards = {
            "a.safetensors": {name: tensors[name] for name in names[::2]},
            "b.safetensors": {name: tensors[name] for name in names[1::2]},
        }
        weight_map = {name: file_name for file_name, shard in shards.items() for name in shard}
        index_change(weight_map)
        change(shards)
        for file_name, shard in shards.items():
            save_file(shard, copied / file_name)
        (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return weight_map

    return write


def test_of_two_shards_with_one_tensor_the_index_says_which_counts(
    copied: Path, sharded: Callable[..., Any], start_engine: Any
) -> None:
    want = tokens_of(start_engine, copied)
    name = "model.layers.0.mlp.up_proj.weight"

    for file_name in ("a.safetensors", "b.safetensors"):

        def twice(shards: dict[str, dict[str, torch.Tensor]], right: str = file_name) -> None:
            (tensor,) = (shard.pop(name) for shard in list(shards.values()) if name in shard)
            for each, shard in shards.items():
                shard[name] = tensor if each == right else torch.full_like(tensor, 7.0)

        sharded(twice, lambda weight_map, right=file_name: weight_map.update({name: right}))
        assert tokens_of(start_engine, copied) == want
        sharded(twice, lambda weight_map: weight_map.pop(name))
        with pytest.raises(ModelLoadError) as refused:
            start_engine(copied)
        assert str(refused.value) == (
            f"{copied / 'b.safetensors'}: tensor {name!r} is in 'a.safetensors', too, and "
            "no index says which of them counts; copy the checkpoint again into "
            "an empty folder"
        )


def test_a_missing_tensor_is_told_with_the_shard_that_should_have_it_or_the_folder(
    copied: Path, sharded: Callable[..., Any], start_engine: Any
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def drop(shards: dict[str, dict[str, torch.Tensor]]) -> None:
        for shard in shards.values():
            shard.pop(name, None)

    weight_map = sharded(drop)
    with pytest.raises(ModelLoadError) as refused:
        start_engine(copied)
    assert str(refused.value) == (
        f"{copied / weight_map[name]}: has no tensor {name!r}, which the index puts "
        "there; copy the checkpoint again"
    )
    sharded(drop, lambda weight_map: weight_map.pop(name))
    with pytest.raises(ModelLoadError) as refused:
        start_engine(copied)
    assert str(refused.value) == (
        f"{copied}: tensor {name!r} is in no file of the checkpoint; config.json, or its "
        "quantization_config, does not fit it: copy or quantize the checkpoint anew"
    )


@pytest.mark.parametrize(
    "index_name", ["model.safetensors.index.json", "gptq_model-4bit-128g.safetensors.index.json"]
)
def test_sharded_checkpoint_gives_the_same_tokens(copied: Path, start_engine: Any, index_name: str) -> None:
    want = tokens_of(start_engine, copied)
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, shard in shards.items():
        save_file({name: tensors[name] for name in shard}, copied / file_name)
    weight_map = {name: file_name for file_name, shard in shards.items() for name in shard}
    index = copied / index_name
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert tokens_of(start_engine, copied) == want
    (copied / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"names 'b\.safetensors', which is no file"):
        start_engine(copied)
    index.write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(ModelLoadError, match="which is no file beside it"):
        start_engine(copied)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        start_engine(copied)


def test_missing_tensor_is_named(copied: Path, start_engine: Any) -> None:
    change_tensors(copied, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is in no file"):
        start_engine(copied)


def test_unexpected_tensor_is_named(copied: Path, start_engine: Any) -> None:
    change_tensors(copied, lambda tensors: tensors.update({"model.layers.0.q_norm.weight": torch.ones(16)}))
    with pytest.raises(ModelLoadError, match=r"1 tensors.*'model\.layers\.0\.q_norm\.weight'"):
        start_engine(copied)


def test_wrong_shape_is_named(copied: Path, start_engine: Any) -> None:
    change_tensors(copied, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' has shape \(3,\).*asks for \(64,\)"):
        start_engine(copied)


def test_quantized_tensor_is_refused(copied: Path, start_engine: Any) -> None:
    change_tensors(
        copied, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    )
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' is torch\.int8"):
        start_engine(copied)


def test_buffers_of_old_checkpoints_are_passed_over(copied: Path, start_engine: Any) -> None:
    want = tokens_of(start_engine, copied)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(copied, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert tokens_of(start_engine, copied) == want


def test_fields_that_nobody_reads_are_logged_once(
    copied: Path, start_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((copied / "config.json").read_bytes())
    (copied / "config.json").write_text(json.dumps(config | {"frobnication": 3}))
    with caplog.at_level(logging.INFO):
        start_engine(copied)
    lines = [one.getMessage() for one in caplog.records if "config.json" in one.getMessage()]
    assert lines == ["config.json has fields that are not known here and were passed over: frobnication"]


def test_head_of_a_tied_checkpoint_is_passed_over(checkpoint: Any, tmp_path: Path, start_engine: Any) -> None:
    source = checkpoint("gqa").folder
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert tokens_of(start_engine, tmp_path) == tokens_of(start_engine, source)


def test_damaged_or_absent_weights_are_refused(copied: Path, start_engine: Any) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read"):
        start_engine(copied)
    weights.rename(copied / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only safetensors checkpoints are read"):
        start_engine(copied)


def test_dummy_weights_depend_on_the_seed_alone(write_config: WriteConfig, start_engine: Any) -> None:
    folder = write_config()
    first = tokens_of(start_engine, folder, load_format="dummy", max_model_len=64, seed=1)
    assert first == tokens_of(start_engine, folder, load_format="dummy", max_model_len=64, seed=1)
    assert first != tokens_of(start_engine, folder, load_format="dummy", max_model_len=64, seed=2)


def test_core_needs_no_server_package() -> None:
    """The core runs as a library: importing it brings none of what only the server needs."""
    program = (
        "import sys; import headway_runtime.engine; "
        "print(sorted({'fastapi', 'pydantic', 'zmq', 'msgspec', 'uvicorn', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"


def test_scheduling_half_of_the_core_imports_no_torch() -> None:
    modules = ["batch", "blocks", "config", "memory", "model_config", "request"]
    modules += ["scheduler", "sequence", "sources"]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(f'headway_runtime.{name}')\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=240, check=True)
