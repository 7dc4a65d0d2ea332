"""Tokenizers made on the spot, and real `headway serve` processes to talk to."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog; and then it does so again, slowly.",
    "What is 12 + 30? The answer is 42. Ünïcödé, 日本語, emoji 👩‍👩‍👧 and 🏳️‍🌈 too.",
    '{"name": "headway", "values": [1, 2, 3], "stop": "###"}',
] * 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("added token", special=False)])
    return tokenizer


def make_byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 has it: spaces as U+2581, unknown characters as byte tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for text in ("▁", "a", "b", "c", "▁the", "▁a", "é", "日", "<0x", "<0xZZ>", "🏳"):
        vocabulary[text] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return make_byte_level_tokenizer()


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    return make_byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: Tokenizer) -> Path:
    """A folder with everything but weights: a tiny Llama's config, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": CHAT_TEMPLATE},
    )
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": byte_level_tokenizer.get_vocab_size(),
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    )
    return folder


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
