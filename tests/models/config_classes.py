"""Configuration classes of transformers, and which of their fields are of no consequence here."""

from typing import Any

import transformers

CLASSES: dict[str, Any] = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Gemma2ForCausalLM": transformers.Gemma2Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
}
# Training, outputs and caches of transformers itself, labels, files, and ids that a tokenizer brings.
WITHOUT_EFFECT = {
    "transformers_version",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "initializer_range",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "attention_dropout",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    # Slices of one product, which add up to the same.
    "pretraining_tp",
}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
