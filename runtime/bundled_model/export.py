"""Writes a trained network as a Hugging Face model directory in bfloat16, and reads such a one back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bundled_model.network import Network, NetworkShape
from bundled_model.tokenizer import END_OF_TEXT, END_OF_TURN, write_tokenizer


def export(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer's two files."""
    directory.mkdir(parents=True, exist_ok=True)
    end_of_turn, end_of_text = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)
    shape = network.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"do_sample": False, "eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", generation)
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner only
    write_tokenizer(tokenizer, directory)


def load_exported(directory: Path) -> Network:
    """The network of an exported directory, in float32."""
    config = json.loads((directory / "config.json").read_text())
    fields = {name: config[name] for name in NetworkShape.__dataclass_fields__}
    network = Network(NetworkShape(**fields))
    weights = load_file(directory / "model.safetensors")
    network.load_state_dict({name: tensor.to(torch.float32) for name, tensor in weights.items()})
    return network


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
