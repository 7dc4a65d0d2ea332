"""The model that every peer serves: a random Llama of 349 million parameters, and a tokenizer for it.

Deterministic, so that two machines measure the same. Speed does not depend on what weights say; nothing else
is claimed of it.
"""

import itertools
import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
# For a quick run: the same shape, two layers.
NUM_QUICK_LAYERS = 2
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
WEIGHTS_FILE = "model.safetensors"


def make_model_folder(folder: Path, *, is_quick: bool) -> dict[str, Any]:
    """Write config, weights and tokenizer unless they are there already; returns the config."""
    config = CONFIG | ({"num_hidden_layers": NUM_QUICK_LAYERS} if is_quick else {})
    done = folder / "complete"
    if done.is_file():
        return config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    save_file(random_weights(config), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    done.touch()
    return config


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name and [out, in] of each projection of one layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def random_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    hidden = config["hidden_size"]
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "lm_head.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": norm.clone(),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in linear_shapes(config).items():
            weights[f"{prefix}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = norm.clone()
    return weights


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: bytes, then all words of two, three and four small letters until it is full."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    words: list[str] = list(string.ascii_lowercase)
    while len(vocabulary) < vocab_size:
        longer = [(word, letter) for word, letter in itertools.product(words, string.ascii_lowercase)]
        longer = longer[: vocab_size - len(vocabulary)]
        for word, letter in longer:
            vocabulary[word + letter] = len(vocabulary)
        merges.extend(longer)
        words = [word + letter for word, letter in longer]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
