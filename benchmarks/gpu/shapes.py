"""Real models' shapes, as far as they decide arithmetic: what random weights are made for."""

from typing import Any

Shape = dict[str, Any]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_8B: Shape = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": LLAMA3_ROPE,
    "dtype": "bfloat16",
}
QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
QWEN3_8B: Shape = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": QWEN3_ROPE,
    "dtype": "bfloat16",
}
QWEN3_30B_A3B: Shape = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": QWEN3_ROPE,
    "dtype": "bfloat16",
}
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY: Shape = LLAMA_8B | _SMALL
TINY_QWEN3: Shape = QWEN3_8B | _SMALL | {"head_dim": 16}
_EIGHT_TO_ONE = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 1}
TINY_MOE: Shape = QWEN3_30B_A3B | _SMALL | _EIGHT_TO_ONE | {"num_experts": 8, "moe_intermediate_size": 32}
