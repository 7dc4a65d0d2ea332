"""What a checkpoint says of its KV cache, which the flag may overrule."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.config import EngineConfig, Envelope, KVCacheDtype, Limits
from headway_runtime.errors import ModelLoadError
from headway_runtime.quantization.kv_scheme import chosen_kv_cache_dtype
from headway_runtime.runner import Runner

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
FLOAT: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "group_size": None,
    "observer": "minmax",
}


def written(folder: Path, scheme: dict[str, Any] | None, **others: Any) -> Path:
    stored = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme, **others}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": stored}))
    return folder


@pytest.mark.parametrize(
    ("scheme", "wanted", "want"),
    [
        pytest.param(FLOAT, "auto", "fp8_e4m3", id="8-bit floats"),
        pytest.param(FLOAT | {"type": "int"}, "auto", "int8", id="8-bit integers"),
        pytest.param(FLOAT | {"strategy": "attn_head"}, "auto", "fp8_e4m3", id="a scale for each head"),
        pytest.param(None, "auto", "auto", id="nothing said"),
        pytest.param(FLOAT, "bfloat16", "bfloat16", id="overruled"),
        pytest.param(FLOAT | {"num_bits": 4}, "plain", "auto", id="not asked"),
        pytest.param(FLOAT | {"num_bits": 4}, "int8", "int8", id="overruled where it is not supported"),
    ],
)
def test_auto_is_what_the_checkpoint_says(
    scheme: dict[str, Any] | None, wanted: KVCacheDtype, want: str, tmp_path: Path
) -> None:
    assert chosen_kv_cache_dtype(wanted, written(tmp_path, scheme)) == want


def test_a_plain_checkpoint_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert chosen_kv_cache_dtype("auto", tmp_path) == "auto"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_bits": 4}, "num_bits=4: keys and values are kept in 8 bits or plain"),
        ({"type": "nf"}, "type='nf': supported: 'float', 'int'"),
        ({"symmetric": False}, "symmetric=False: keys and values have no zero points"),
        ({"strategy": "block"}, "strategy='block': supported: 'tensor'"),
    ],
)
def test_what_a_cache_cannot_be_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        chosen_kv_cache_dtype("auto", written(tmp_path, FLOAT | change))
    assert str(caught.value).startswith("config.json: quantization_config: kv_cache_scheme: ")
    assert complaint in str(caught.value)
    assert "--kv-cache-dtype" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "kept"), [("auto", "fp8_e4m3"), ("plain", "float32"), ("bfloat16", "bfloat16")]
)
def test_an_engine_keeps_what_the_checkpoint_says(wanted: KVCacheDtype, kept: str, tmp_path: Path) -> None:
    config = EngineConfig(
        model_path=str(written(tmp_path, FLOAT)),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        max_model_len=64,
        block_size=16,
        kv_cache_memory_bytes=1 << 20,
        envelope=Envelope(4, 64),
        limits=Limits(4, 64),
        max_waiting=1,
        num_threads=1,
        kv_cache_dtype=wanted,
    )
    runner = Runner(config)
    assert runner.kv_dtype == kept
    assert (runner._cache.layers[0].scales is not None) == (kept == "fp8_e4m3")
