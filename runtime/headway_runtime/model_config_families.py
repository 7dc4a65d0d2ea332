"""The architectures that are served: what each fixes, and which fields of its `config.json` have a meaning.

A field is honoured by all families or by those that have it among their `defaults`; or it must have one of
the values that change nothing (NEUTRAL), else the model is refused; or it never has an effect on results.
Defaults are those of transformers' configuration classes. Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

GEMMA_SIZES: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
# Published Gemma 3 checkpoints leave sizes out.
GEMMA3_SIZES = GEMMA_SIZES | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
}
QWEN_WINDOW: dict[str, object] = {"use_sliding_window": False, "sliding_window": 4096}

# Fields of these and of similar architectures, and the values of them that change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "per_layer_config": ({}, []),
    "pruned_heads": ({},),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "layer_types": (),
    "sliding_window_pattern": (),
    "rope_local_base_freq": (),
    "mlp_layer_types": (),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "num_nextn_predict_layers": (0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "no_rope_layer_interval": (0,),
    "attn_temperature_tuning": (False,),
    "attention_sinks": (False,),
    "attention_sink": (False,),
    "alibi": (False,),
    "attn_output_gate": (False,),
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm", "rms"),
    "qkv_bias": (False,),
    "rotary_pct": (1, 1.0),
    "scale_depth": (),
    "scale_emb": (1, 1.0),
    "use_parallel_residual": (False,),
}
# Of training, of other programs, of other parts than the text model, or read elsewhere.
WITHOUT_EFFECT = frozenset(
    {
        *(
            "_name_or_path",
            "_sliding_window_pattern",
            "_attn_implementation_autoset",
            "attn_implementation",
            "auto_map",
            "cache_implementation",
        ),
        *(
            "transformers_version",
            "use_cache",
            "use_bfloat16",
            "torchscript",
            "tf_legacy_loss",
            "tokenizer_class",
        ),
        *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "compression_config"),
        *(
            "attention_dropout",
            "hidden_dropout",
            "embd_pdrop",
            "resid_pdrop",
            "initializer_range",
            "pretraining_tp",
        ),
        *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "gradient_checkpointing"),
        *(
            "bos_token_id",
            "pad_token_id",
            "sep_token_id",
            "unk_token_id",
            "decoder_start_token_id",
            "is_decoder",
        ),
        *(
            "chunk_size_feed_forward",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "problem_type",
        ),
        *("id2label", "label2id", "finetuning_task", "task_specific_params", "tie_encoder_decoder", "prefix"),
        *("text_config", "vision_config", "audio_config", "mm_tokens_per_image", "image_token_index"),
        *(
            "boi_token_index",
            "eoi_token_index",
            "hidden_act",
            "max_window_layers",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
        ),
    }
)


class Windows(Enum):
    """Which layers attend to the last tokens only."""

    NONE = "none"
    ALL = "all, where a window is given"
    UPPER = "those from max_window_layers on, where use_sliding_window says so"
    ALL_IF_USED = "all, where use_sliding_window says so"
    ALTERNATING = "all but every so many"


@dataclass(frozen=True, slots=True)
class Family:
    """defaults: of the fields that have a meaning here and that a file may leave out, None for none.

    rope_theta: where the file says none. has_qkv_bias: always, whatever `attention_bias` says.
    normalizes_heads: queries and keys, each head by itself. tensor_prefixes: of the names of all tensors but
    the head's; the first that fits counts. foreign: prefixes of tensors that belong to no text model.
    text_field: of the object that the text model's fields lie in, where they lie in one.
    """

    model_type: str
    defaults: Mapping[str, object]
    windows: Windows = Windows.NONE
    rope_theta: float = 10_000.0
    has_qkv_bias: bool = False
    normalizes_heads: bool = False
    has_experts: bool = False
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    tensor_prefixes: tuple[str, ...] = ("model.",)
    foreign: tuple[str, ...] = ()
    text_field: str | None = None

    @property
    def differs_by_window(self) -> bool:
        """Whether layers with a window rotate by another table than those without."""
        return "rope_local_base_freq" in self.defaults

    def unknown(self, names: AbstractSet[str]) -> list[str]:
        """Of fields that nobody has read, those of which it is not known why."""
        return sorted(names - WITHOUT_EFFECT - self.defaults.keys())

    def unmet(self, values: Mapping[str, object]) -> str | None:
        """A field whose value would change results here and is not honoured."""
        for name, allowed in (NEUTRAL | dict(self.neutral)).items():
            is_honoured = name in self.defaults and name not in self.neutral
            value = values.get(name)
            if not is_honoured and value is not None and value not in allowed:
                return name
        return None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
    ),
    "MistralForCausalLM": Family(
        "mistral",
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        Windows.ALL,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "layer_types": None}
        | {"max_window_layers": 28}
        | QWEN_WINDOW,
        Windows.UPPER,
        has_qkv_bias=True,
        # The biases are there whatever these say.
        neutral={"attention_bias": (False, True), "qkv_bias": (False, True)},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 32, "layer_types": None}
        | {"max_window_layers": 28, "head_dim": 128, "attention_bias": False}
        | QWEN_WINDOW,
        Windows.UPPER,
        normalizes_heads=True,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        GEMMA_SIZES | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        Windows.ALTERNATING,
        neutral={"sliding_window_pattern": (2,)},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        GEMMA3_SIZES,
        Windows.ALTERNATING,
        rope_theta=1_000_000.0,
        normalizes_heads=True,
    ),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        GEMMA3_SIZES,
        Windows.ALTERNATING,
        rope_theta=1_000_000.0,
        normalizes_heads=True,
        # transformers reads this one and does not do it here; nor do published checkpoints have it.
        neutral={"final_logit_softcapping": ()},
        tensor_prefixes=("language_model.model.", "model.language_model."),
        foreign=(
            "vision_tower.",
            "model.vision_tower.",
            "multi_modal_projector.",
            "model.multi_modal_projector.",
        ),
        text_field="text_config",
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts": None,
            "num_experts_per_tok": 2,
        },
        Windows.ALL,
        rope_theta=1_000_000.0,
        has_experts=True,
        neutral={"norm_topk_prob": (True,)},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        }
        | QWEN_WINDOW,
        Windows.ALL_IF_USED,
        normalizes_heads=True,
        has_experts=True,
    ),
}
