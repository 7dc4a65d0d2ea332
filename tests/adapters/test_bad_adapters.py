"""Adapters and flags that cannot be: each a named error that says which file or field, and what to do."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_runtime.adapters import adapter_file
from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.adapters.adapter_file import LayerShape, read_adapter
from headway_runtime.adapters.loading import AdapterLoading
from headway_runtime.adapters.options import lora_module
from headway_runtime.errors import ConfigError, ModelFetchError, ModelLoadError
from headway_runtime.server.options import parse_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.adapters.conftest import Checkpoint

HIDDEN, MLP, KV = 64, 112, 32
LAYERS = {
    f"layers.{index}.{name}": LayerShape(*shape)
    for index in range(3)
    for name, shape in {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, KV),
        "self_attn.v_proj": (HIDDEN, KV),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (HIDDEN, MLP),
        "mlp.up_proj": (HIDDEN, MLP),
        "mlp.down_proj": (MLP, HIDDEN),
    }.items()
}
PREFIX = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture
def adapter(checkpoint: Callable[..., Checkpoint], tmp_path: Path) -> Path:
    """A copy of a good one, to be spoilt."""
    folder = tmp_path / "adapter"
    shutil.copytree(checkpoint().adapters["one"], folder)
    return folder


def read(folder: Path, max_rank: int = 64) -> Any:
    return read_adapter(folder, LAYERS, ("model.",), max_rank)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        read(folder)
    return str(refused.value)


def test_a_good_one_is_read(adapter: Path) -> None:
    found = read(adapter)
    assert found.deltas.keys() == LAYERS.keys()
    assert found.rank == 8


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("peft_type", "IA3", "only 'LORA' adapters are supported"),
        ("task_type", "SEQ_CLS", "only adapters of 'CAUSAL_LM' models"),
        ("bias", "all", "train it with bias='none'"),
        ("modules_to_save", ["embed_tokens"], "merge it into the model"),
        ("init_lora_weights", "pissa_niter_4", "convert it to a plain adapter"),
        ("use_dora", True, "DoRA"),
        ("fan_in_fan_out", True, "transposed"),
        ("lora_bias", True, "biases of B"),
        ("layer_replication", [[0, 2]], "copies of layers"),
        ("target_parameters", ["experts.gate_up_proj"], "merged experts"),
        ("trainable_token_indices", [1], "changed embeddings"),
        ("alora_invocation_tokens", [5], "aLoRA"),
        ("use_qalora", True, "QA-LoRA"),
        ("something_new", {"a": 1}, "not known here and may change the result"),
        ("r", 0, "want a rank from 1 to 512"),
        ("r", "8", "want a rank from 1 to 512"),
        ("lora_alpha", None, "want a number"),
        pytest.param("lora_alpha", 10**400, "want a number that a float can hold", id="no float"),
        ("lora_alpha", float("inf"), "want a number that a float can hold"),
        ("alpha_pattern", {"q_proj": 10**400}, "want a number that a float can hold"),
        ("use_rslora", "yes", "want true or false"),
        ("target_modules", [7], "want names of layers"),
        ("target_modules", "(", "no regular expression"),
        ("exclude_modules", "(", "no regular expression"),
        ("exclude_modules", {"a": 1}, "want names of layers, or a pattern"),
        ("layers_to_transform", ["1"], "want numbers of layers"),
        ("layers_pattern", ["("], "no regular expression"),
        ("rank_pattern", {"q_proj": 1000}, "want a rank"),
        ("alpha_pattern", {"q_proj": "x"}, "want a number"),
        ("rank_pattern", {"(": 3}, "no regular expression"),
        # An expression by itself, and none where it is used: for the end of a name.
        ("rank_pattern", {"(?i)Q_PROJ": 4}, "='(?i)Q_PROJ': no regular expression for the end"),
        ("alpha_pattern", {"x{99999999999999999999}": 4}, "no regular expression"),
        ("rank_pattern", {"(" * 5000 + ")" * 5000: 4}, "no regular expression"),
        ("rank_pattern", 3, "want an object"),
    ],
)
def test_a_field_that_asks_for_what_there_is_not_is_named(
    field: str, value: Any, remedy: str, adapter: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(adapter, **{field: value})
    message = refusal(adapter)
    assert message.startswith(f"{adapter / 'adapter_config.json'}: {field}")
    assert remedy in message


def test_unknown_fields_that_are_off_change_nothing(adapter: Path, edit_config: Callable[..., None]) -> None:
    edit_config(adapter, something_new=None, another=False, third={}, lora_dropout=0.3, peft_version="9")
    assert read(adapter).deltas.keys() == LAYERS.keys()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("base_model.model.lm_head.lora_A.weight", "changes the LM head or the embeddings"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "changes embeddings, which is not supported",
        ),
        (f"{PREFIX}.lora_magnitude_vector.weight", "is of a DoRA adapter"),
        (f"{PREFIX}.lora_B.bias", "is neither lora_A nor lora_B of a layer"),
        ("base_model.model.model.embed_tokens.modules_to_save.weight", "is a whole layer"),
        ("base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_A.weight", "a mixture's experts"),
        ("base_model.model.model.layers.0.mlp.gate.lora_A.weight", "experts or its router"),
        ("base_model.model.model.layers.3.mlp.up_proj.lora_A.weight", "which this model does not have"),
        (
            "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
            "which this model does not",
        ),
    ],
)
def test_a_tensor_without_a_place_is_named(name: str, complaint: str, adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), name: torch.zeros(8, 64)}, path)
    message = refusal(adapter)
    assert message.startswith(f"{path}: tensor {name!r} ")
    assert complaint in message


def test_matrices_of_another_base_are_told_by_their_shapes_and_the_base_that_they_are_of(
    adapter: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(adapter, base_model_name_or_path="org/another-model")
    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), f"{PREFIX}.lora_A.weight": torch.zeros(8, 96)}, path)
    assert refusal(adapter) == (
        f"{path}: lora_A of 'model.layers.1.self_attn.q_proj' has shape (8, 96), this model and "
        "adapter_config.json (r) ask for (8, 64) (adapter_config.json says "
        "base_model_name_or_path='org/another-model'); use an adapter that was trained for this model"
    )


def test_an_adapter_of_fewer_layers_is_of_another_base(checkpoint: Callable[..., Checkpoint]) -> None:
    more = LAYERS | {name.replace("layers.2", "layers.3"): shape for name, shape in LAYERS.items()}
    with pytest.raises(ModelLoadError, match=r"has no tensors for 'layers\.3\.self_attn\.q_proj'"):
        read_adapter(checkpoint().adapters["one"], more, ("model.",), 64)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"target_modules": r".*\.(q|v)_proj"}, id="pattern"),
        pytest.param(
            {"target_modules": r"model\.layers\.\d+\.self_attn\.q_proj"}, id="pattern of whole names"
        ),
        pytest.param({"target_modules": "all-linear"}, id="all"),
        pytest.param({"layers_to_transform": [0, 3]}, id="numbers"),
        pytest.param({"layers_to_transform": 3, "layers_pattern": "layers"}, id="a number"),
        pytest.param({"exclude_modules": ["down_proj"]}, id="exceptions"),
        pytest.param({"exclude_modules": r".*\.layers\.2\..*"}, id="pattern of exceptions"),
    ],
)
def test_an_adapter_of_fewer_layers_is_told_however_it_names_them(
    fields: dict[str, Any], adapter: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(adapter, **fields)
    assert read(adapter).deltas.keys() == LAYERS.keys()
    more = LAYERS | {name.replace("layers.2", "layers.3"): shape for name, shape in LAYERS.items()}
    with pytest.raises(ModelLoadError, match=r"has no tensors for 'layers\.3\.self_attn\.q_proj'"):
        read_adapter(adapter, more, ("model.",), 64)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"target_modules": r".*\.[012]\..*"}, id="pattern"),
        pytest.param({"layers_to_transform": [0, 1, 2]}, id="numbers"),
        pytest.param({"exclude_modules": r".*\.3\..*"}, id="pattern of exceptions"),
        pytest.param(
            {"exclude_modules": [f"model.{one.replace('s.2', 's.3')}" for one in LAYERS]}, id="names"
        ),
    ],
)
def test_layers_that_are_not_meant_may_be_missing(
    fields: dict[str, Any], adapter: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(adapter, **fields)
    more = LAYERS | {name.replace("layers.2", "layers.3"): shape for name, shape in LAYERS.items()}
    assert read_adapter(adapter, more, ("model.",), 64).deltas.keys() == LAYERS.keys()


@pytest.mark.parametrize(
    ("told", "want"),
    [("org/llama", False), ("/models/Llama/", False), ("", False), ("org/llama-chat", True)],
)
def test_a_base_of_another_name_is_told_in_the_log(
    told: str,
    adapter: Path,
    edit_config: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    want: bool,
) -> None:
    edit_config(adapter, base_model_name_or_path=told)
    bank = AdapterBank(1, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(AdapterBank, "layers", LAYERS)
    monkeypatch.setattr(AdapterBank, "made", lambda *_: [])
    loading = AdapterLoading(bank, ("model.",), 64, "hf://other/llama@main")
    loading.begin(0, str(adapter))
    monkeypatch.setattr(AdapterBank, "put", lambda *_: None)
    assert loading.finish(0).base_model == told
    assert (f"base_model_name_or_path={told!r} is not the model served" in caplog.text) is want


def test_the_served_models_name_reaches_the_adapters() -> None:
    options = parse_options(["bundled://headway-tiny", "--enable-lora"], environment={})
    assert options.engine.lora is not None
    assert options.engine.lora.base == "bundled://headway-tiny"


def test_what_is_broken_or_missing_is_named(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({name: one for name, one in weights.items() if name != f"{PREFIX}.lora_B.weight"}, path)
    assert "'model.layers.1.self_attn.q_proj' has no lora_B" in refusal(adapter)
    save_file({**weights, f"{PREFIX}.lora_B.weight": torch.full((64, 8), torch.inf)}, path)
    assert "lora_B of 'model.layers.1.self_attn.q_proj' holds numbers that are infinite" in refusal(adapter)
    save_file({**weights, f"{PREFIX}.lora_B.weight": torch.zeros(64, 8, dtype=torch.int8)}, path)
    assert "is torch.int8; want bfloat16, float16 or float32" in refusal(adapter)
    save_file({}, path)
    assert "holds no tensor of an adapter" in refusal(adapter)
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(adapter).startswith(f"{path}: cannot be read (")
    path.rename(adapter / "adapter_model.bin")
    assert "in safetensors" in refusal(adapter)
    (adapter / "adapter_config.json").write_text("[]")
    assert refusal(adapter).endswith("adapter_config.json: holds no JSON object; copy the adapter again")
    (adapter / "adapter_config.json").unlink()
    assert "there is no such file; give the folder of an adapter as PEFT saves it" in refusal(adapter)


def test_a_scale_that_makes_weights_infinite_is_named(
    adapter: Path, edit_config: Callable[..., None]
) -> None:
    edit_config(adapter, lora_alpha=1e300)
    message = refusal(adapter)
    assert message.startswith(f"{adapter / 'adapter_config.json'}: 'model.layers.")
    assert "is scaled by 1.25e+299 (lora_alpha, alpha_pattern)" in message


def test_an_adapter_that_changes_while_it_is_read_is_refused(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = adapter / "adapter_model.safetensors"
    others = {name: one + 1.0 for name, one in load_file(path).items()}
    delta = adapter_file._delta

    def written_anew(*arguments: Any) -> Any:
        found = delta(*arguments)
        path.unlink()
        save_file(others, path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(adapter_file, "_delta", written_anew)
        assert "changed while it was read" in refusal(adapter)
    assert read(adapter).digest != b""


def test_a_rank_above_the_flag_names_the_flag(adapter: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=re.escape("has rank 8, more than --max-lora-rank=7; raise that")
    ):
        read(adapter, max_rank=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-modules", "a=X"], "--lora-modules='a=X' needs --enable-lora; give both"),
        (["--max-loras", "3"], "--max-loras=3 needs --enable-lora; give both"),
        (["--enable-lora", "--max-loras", "3", "--max-cpu-loras", "2"], "--max-cpu-loras=2 is less than"),
        (["--enable-lora", "--lora-modules", "a"], "--lora-modules='a': want NAME=PATH"),
        (["--enable-lora", "--lora-modules", "{"], "is not JSON"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "--lora-modules: path=None: want a text"),
        (
            ["--enable-lora", "--lora-modules", '{"name": "a", "path": "X", "r": 1}'],
            "--lora-modules: r=1 is not known; there are name, path, base_model_name",
        ),
        (["--enable-lora", "--lora-modules", "a=X", "a=X"], "names 'a' twice"),
        (["--enable-lora", "--lora-modules", "a b=X"], "lora_name='a b': want 1 to 256 characters"),
        (["--enable-lora", "--lora-modules", "a=/nowhere"], "no adapter_config.json is in '/nowhere'"),
        (["--enable-lora", "--lora-modules", "a=pvc://c/p"], "can be read by pods alone"),
        (["--enable-lora", "--lora-modules", "a=bundled://x"], "no adapters are bundled"),
        (
            ["--enable-lora", "--max-lora-rank", "4", "--lora-modules", "a=X"],
            "r=8 is more than --max-lora-rank=4",
        ),
        (["--enable-lora", "--lora-modules", "served=X"], "name='served' is the model's own"),
        (
            ["--enable-lora", "--lora-modules", '{"name": "a", "path": "X", "base_model_name": "other"}'],
            "base_model_name='other' is not served here; want 'served'",
        ),
        (
            ["--enable-lora", "--max-loras=1", "--max-cpu-loras=1", "--lora-modules", "a=X", "b=X"],
            "names 2 adapters, more than --max-cpu-loras=1",
        ),
    ],
)
def test_flags_that_cannot_be_are_named(arguments: list[str], message: str, adapter: Path) -> None:
    given = [one.replace("X", str(adapter)) for one in arguments]
    with pytest.raises(ConfigError) as refused:
        parse_options(["bundled://headway-tiny", "--served-model-name", "served", *given], environment={})
    assert message.replace("X", str(adapter)) in str(refused.value)


def test_vllms_forms_of_the_flag_are_taken(adapter: Path) -> None:
    fields = {"name": "b=c", "path": f"file://{adapter}", "base_model_name": "served"}
    given = ["--lora-modules", f"a={adapter}", json.dumps(fields), "--lora-modules", f"c={adapter}"]
    options = parse_options(
        ["bundled://headway-tiny", "--served-model-name", "served", "--enable-lora", *given], environment={}
    )
    lora = options.engine.lora
    assert lora is not None
    assert [(one.name, one.folder, one.parent) for one in lora.modules] == [
        ("a", str(adapter), ""),
        ("b=c", str(adapter), "served"),
        ("c", str(adapter), ""),
    ]
    assert (lora.max_loras, lora.max_cpu_loras, lora.max_lora_rank) == (8, 8, 16)


def test_a_remote_adapter_that_cannot_be_had_is_told_as_a_model_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADWAY_OFFLINE", "1")
    with pytest.raises(ModelFetchError, match=r"is told to stay offline"):
        lora_module("a", "hf://org/adapter", download_dir=str(tmp_path))
