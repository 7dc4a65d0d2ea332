"""A folder that `headway serve` takes for a model: a real byte-level BPE, a configuration, and no weights.

`step_token_ids` names tokens with distinct plain texts, so that a reader can tell from a chunk's text which
step of the engine it came from.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
MAX_MODEL_LEN = 131072
# Steps are told apart modulo this many.
NUM_STEP_TOKENS = 512


def make_model_folder(folder: Path, corpus: Path) -> None:
    """Train a tokenizer on the Markdown and Python files below `corpus`, and write the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8") for kind in ("md", "py") for path in corpus.rglob(f"*.{kind}")]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": "<|eos|>"})
    _write(
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
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": MAX_MODEL_LEN,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "eos_token_id": 0,
        },
    )


def step_token_ids(folder: Path) -> list[int]:
    """NUM_STEP_TOKENS ids of tokens that are ASCII letters, perhaps after a space, by their ids."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id])
        if text.isascii() and text.strip(" ").isalpha():
            found.append(token_id)
            if len(found) == NUM_STEP_TOKENS:
                return found
    raise ValueError(f"only {len(found)} of {NUM_STEP_TOKENS} tokens are plain words; train on more text")


def step_texts(folder: Path) -> dict[bytes, int]:
    """The text of each step's token, as JSON writes it -> the step's number modulo NUM_STEP_TOKENS."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {
        tokenizer.decode([token_id]).encode(): number
        for number, token_id in enumerate(step_token_ids(folder))
    }


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
