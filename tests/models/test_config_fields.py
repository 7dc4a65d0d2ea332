"""Every field of the configuration classes of transformers: what becomes of it here, decided one by one.

A field that changes results is honoured or refused; what neither does is listed as without effect. So a
version of transformers that brings another field fails here first.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.models.config_classes import CLASSES, SIZES, WITHOUT_EFFECT

from headway_runtime.errors import ModelLoadError
from headway_runtime.model_config import ModelConfig, read_model_config
from headway_runtime.model_config_families import FAMILIES
from headway_runtime.model_config_layers import ExpertsConfig, LayerConfig

# A value of each field that is not its default, and what else must be so that it counts.
OTHER_VALUES: dict[str, Any] = {
    "architectures": ["OtherForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": None,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
    "dtype": "bfloat16",
    "eos_token_id": [3, 4],
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 17,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
    "attn_logit_softcapping": 11.0,
    "final_logit_softcapping": 12.0,
    "query_pre_attn_scalar": 99,
    "use_bidirectional_attention": True,
    "is_encoder_decoder": True,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
}
WINDOWS_ON = {"use_sliding_window": True, "sliding_window": 9}


def fields_of(architecture: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(CLASSES[architecture])}


ALL_FIELDS = [(name, field) for name in CLASSES for field in fields_of(name) if field not in WITHOUT_EFFECT]


@pytest.mark.parametrize(("architecture", "field"), ALL_FIELDS)
def test_field_that_changes_results_is_honoured_or_refused(architecture: str, field: str, read: Any) -> None:
    rest: dict[str, Any] = {}
    if field in ("sliding_window", "max_window_layers", "layer_types") and "Qwen" in architecture:
        rest = dict(WINDOWS_ON)
    if field in ("sliding_window", "use_sliding_window") and "Qwen" in architecture:
        rest["max_window_layers"] = 1
    usual = read(architecture, **rest)
    value = OTHER_VALUES[field]
    if field == "tie_word_embeddings":
        value = not usual.tie_word_embeddings
    if field == "rope_parameters" and architecture == "Gemma3ForCausalLM":
        value = {"sliding_attention": value}
    other: ModelConfig | None = None
    complaint = ""
    try:
        other = read(architecture, **rest | {field: value})
    except ModelLoadError as error:
        complaint = str(error)
    if other is None:
        assert complaint.startswith(f"config.json: {field}={value!r}: ")
        assert ";" in complaint, "no remedy"
    else:
        assert other != usual


@pytest.mark.parametrize("architecture", CLASSES)
def test_defaults_are_those_of_transformers(architecture: str, read: Any) -> None:
    own = fields_of(architecture)
    for name, value in FAMILIES[architecture].defaults.items():
        if name in own:
            assert own[name].default == value, name
    made: Any = CLASSES[architecture](**SIZES)
    assert read(architecture).tie_word_embeddings == made.tie_word_embeddings
    assert read(architecture).rms_norm_eps == made.rms_norm_eps
    assert own.keys() - WITHOUT_EFFECT <= OTHER_VALUES.keys()


@pytest.mark.parametrize("architecture", CLASSES)
def test_left_out_heads_are_as_many_as_in_transformers(architecture: str, read: Any) -> None:
    sizes = SIZES | {"num_attention_heads": 32, "hidden_size": 512}
    del sizes["num_key_value_heads"]
    made: Any = CLASSES[architecture](**sizes)
    got = read(architecture, num_attention_heads=32, hidden_size=512, num_key_value_heads=...)
    assert got.num_kv_heads == made.num_key_value_heads
    assert got.head_dim == (getattr(made, "head_dim", None) or 512 // 32)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {}, [4096] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("MixtralForCausalLM", {}, [None] * 4),
        ("MixtralForCausalLM", {"sliding_window": 7}, [7] * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, [None] * 4),
        ("Qwen2ForCausalLM", WINDOWS_ON, [None] * 4),
        ("Qwen2ForCausalLM", WINDOWS_ON | {"max_window_layers": 0}, [9] * 4),
        ("Qwen3ForCausalLM", WINDOWS_ON | {"max_window_layers": 3}, [None, None, None, 9]),
        ("Qwen3ForCausalLM", WINDOWS_ON | {"sliding_window": None, "max_window_layers": 1}, [None] * 4),
        ("Qwen3MoeForCausalLM", {"sliding_window": 7}, [None] * 4),
        ("Qwen3MoeForCausalLM", WINDOWS_ON, [9] * 4),
        ("Gemma2ForCausalLM", {"sliding_window": 7}, [7, None, 7, None]),
        ("Gemma2ForCausalLM", {"layer_types": ["attention"] * 4, "sliding_window": None}, [None] * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 7}, [7] * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 7, "sliding_window_pattern": 3}, [7, 7, None, 7]),
    ],
)
def test_windows_are_where_transformers_has_them(
    architecture: str, fields: dict[str, Any], windows: list[int | None], read: Any
) -> None:
    assert [layer.window for layer in read(architecture, **fields).layers] == windows


def test_experts_are_read_under_old_and_new_names(read: Any) -> None:
    mixtral = read("MixtralForCausalLM", num_local_experts=4)
    assert mixtral.experts == ExpertsConfig(num_experts=4, num_used=2, size=48, normalizes=True)
    for name in ("num_experts", "num_local_experts"):
        qwen = read("Qwen3MoeForCausalLM", **{name: 12}, mlp_only_layers=[2], decoder_sparse_step=2)
        assert qwen.experts == ExpertsConfig(num_experts=12, num_used=8, size=768, normalizes=False)
        assert qwen.layers == tuple(LayerConfig(None, 0, index in (1, 3)) for index in range(4))
    assert read("Qwen3MoeForCausalLM").experts.num_experts == 128


def test_gemma3_within_another_model_is_read_with_the_defaults_of_its_class(read: Any) -> None:
    left_out = dict.fromkeys(SIZES, ...)
    text: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(
        "Gemma3ForConditionalGeneration",
        **left_out,
        model_type="gemma3",
        text_config=text,
        vision_config={"model_type": "siglip_vision_model"},
        eos_token_id=[1, 106],
        torch_dtype="bfloat16",
    )
    made: Any = transformers.Gemma3TextConfig(**text)
    for own, its in (("num_kv_heads", "num_key_value_heads"), ("activation", "hidden_activation")):
        assert getattr(config, own) == {"gelu_pytorch_tanh": "gelu_tanh"}.get(got := getattr(made, its), got)
    for name in ("vocab_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(config, name) == getattr(made, name)
    assert [layer.window for layer in config.layers] == [
        1024 if kind == "sliding_attention" else None for kind in made.layer_types
    ]
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == ("bfloat16", {1, 106}, True)
    assert config.attention_scale == 256**-0.5


@pytest.mark.parametrize(
    ("architecture", "fields", "complaint"),
    [
        ("LlamaForCausalLM", {"model_type": "mistral"}, "model_type='mistral': LlamaForCausalLM is of type"),
        ("LlamaForCausalLM", {"architectures": [["x"]]}, "config.json: architectures=[['x']]: supported are"),
        ("LlamaForCausalLM", {"architectures": [{}]}, "config.json: architectures=[{}]: supported are"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": [{}, 1, 2, 3]},
            "config.json: layer_types=[{}, 1, 2, 3]: want 4 of 'full_attention'",
        ),
        ("LlamaForCausalLM", {"rms_norm_eps": 10**400}, "want a positive number"),
        ("LlamaForCausalLM", {"rope_theta": float("inf")}, "rope_theta=inf: want a positive number"),
        ("LlamaForCausalLM", {"sliding_window": 64}, "sliding_window=64: would change this architecture's"),
        ("LlamaForCausalLM", {"residual_multiplier": 0.2}, "residual_multiplier=0.2"),
        ("LlamaForCausalLM", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config="),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("MistralForCausalLM", {"sliding_window": "wide"}, "sliding_window='wide': want a positive integer"),
        ("MistralForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types="),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "sliding_window=4096: some layers"),
        ("Qwen2ForCausalLM", WINDOWS_ON | {"layer_types": ["chunked_attention"] * 4}, "layer_types="),
        ("Qwen2ForCausalLM", WINDOWS_ON | {"layer_types": ["full_attention"]}, "want 4 of 'full_attention'"),
        ("Qwen2ForCausalLM", WINDOWS_ON | {"max_window_layers": -1}, "max_window_layers=-1: want 0 or more"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 200}, "num_experts_per_tok=200: there are 128"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_local_experts": 8}, "num_experts=4: num_local_exp"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["first"]}, "mlp_only_layers=['first']"),
        ("MixtralForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts=0"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window=None"),
        (
            "Gemma2ForCausalLM",
            {"hidden_activation": "relu"},
            "hidden_activation='relu': supported are 'silu'",
        ),
        ("LlamaForCausalLM", {"hidden_act": ["silu"]}, "hidden_act=['silu']: supported are 'silu'"),
        ("MixtralForCausalLM", {"num_experts": [8], "num_local_experts": 8}, "num_experts=[8]: want a pos"),
        ("LlamaForCausalLM", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope=True"),
        ("LlamaForCausalLM", {"no_rope_layer_interval": 4}, "no_rope_layer_interval=4"),
        ("LlamaForCausalLM", {"attn_temperature_tuning": 4}, "attn_temperature_tuning=4"),
        ("Qwen3ForCausalLM", {"attention_sinks": True}, "attention_sinks=True"),
        ("Qwen3ForCausalLM", {"attention_sink": True}, "attention_sink=True: would change this"),
        ("Qwen3ForCausalLM", {"attn_output_gate": True}, "attn_output_gate=True: would change this"),
        ("LlamaForCausalLM", {"alibi": True}, "alibi=True: would change this"),
        ("LlamaForCausalLM", {"norm_type": "layernorm"}, "norm_type='layernorm': would change this"),
        ("LlamaForCausalLM", {"qkv_bias": True}, "qkv_bias=True: would change this"),
        ("LlamaForCausalLM", {"rotary_pct": 0.25}, "rotary_pct=0.25: would change this"),
        ("LlamaForCausalLM", {"scale_depth": 1.4}, "scale_depth=1.4: would change this"),
        ("LlamaForCausalLM", {"scale_emb": 12}, "scale_emb=12: would change this"),
        ("LlamaForCausalLM", {"use_parallel_residual": True}, "use_parallel_residual=True: would change"),
        (
            "Qwen2ForCausalLM",
            {"dual_chunk_attention_config": {"chunk_size": 0}},
            "config.json: dual_chunk_attention_config: chunk_size=0: want a positive integer",
        ),
        ("Gemma2ForCausalLM", {"sliding_window_pattern": 6}, "sliding_window_pattern=6"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": SIZES | {"final_logit_softcapping": 30.0}},
            "config.json: text_config: final_logit_softcapping=30.0",
        ),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": SIZES | {"model_type": "llama"}},
            "config.json: text_config: model_type='llama': want 'gemma3_text'",
        ),
        ("Gemma3ForConditionalGeneration", {"text_config": 5}, "text_config=5: want an object"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    architecture: str, fields: dict[str, Any], complaint: str, read: Any
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(architecture, **fields)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("architecture", CLASSES)
def test_what_transformers_writes_is_read(architecture: str, read: Any, tmp_path: Path) -> None:
    made: Any = CLASSES[architecture](**SIZES | {"architectures": [architecture]})
    want = read(architecture, eos_token_id=made.eos_token_id)
    made.save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == want
    assert read_model_config(tmp_path).unknown_fields == ()


NOT_DONE_AND_NOT_ASKED_FOR: dict[str, Any] = {
    "rope_interleaved": False,
    "use_mrope": False,
    "no_rope_layer_interval": 0,
    "attn_temperature_tuning": False,
    "attention_sinks": None,
    "attention_sink": False,
    "alibi": False,
    "attn_output_gate": False,
    "norm_type": "rmsnorm",
    "qkv_bias": False,
    "rotary_pct": 1.0,
    "scale_depth": None,
    "scale_emb": 1,
    "use_parallel_residual": False,
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_not_done_may_be_said_not_to_be_wanted(architecture: str, read: Any) -> None:
    inner = architecture == "Gemma3ForConditionalGeneration"
    fields = NOT_DONE_AND_NOT_ASKED_FOR
    got = read(architecture, **{"text_config": SIZES | fields} if inner else fields)
    assert got == (read(architecture, text_config=SIZES) if inner else read(architecture))
    assert got.unknown_fields == ()


def test_the_biases_of_qwen2_may_be_told_of_by_another_name(read: Any) -> None:
    assert read("Qwen2ForCausalLM", qkv_bias=True) == read("Qwen2ForCausalLM")


def test_of_dual_chunk_attention_the_first_chunk_is_served(read: Any) -> None:
    """Qwen2.5-1M: up to there it is attention as usual."""
    chunks = {"chunk_size": 96, "local_size": 8, "original_max_position_embeddings": 96}
    got = read("Qwen2ForCausalLM", dual_chunk_attention_config=chunks)
    assert got.max_position_embeddings == got.longest_context == 96
    assert got.told_longest_context.startswith("dual_chunk_attention_config.chunk_size, 96: of its max_pos")
    assert " 128, more need dual chunk attention" in got.told_longest_context
    longer = read("Qwen2ForCausalLM", dual_chunk_attention_config=chunks | {"chunk_size": 128})
    assert longer == read("Qwen2ForCausalLM")


def test_fields_that_nobody_reads_are_told(read: Any) -> None:
    fields = {"frobnication": 3, "another": None, "use_cache": True, "hidden_act": "silu", "a_list": [1]}
    assert read("LlamaForCausalLM", **fields).unknown_fields == ("a_list", "frobnication")
    inner = SIZES | {"frobnication": 3}
    got = read("Gemma3ForConditionalGeneration", text_config=inner, vision_config={}, whole=1)
    assert got.unknown_fields == ("whole", "text_config.frobnication")
