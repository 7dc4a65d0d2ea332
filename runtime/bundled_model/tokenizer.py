"""The tokenizer: byte-level BPE trained on the corpus, each digit a token of its own.

Byte-level means that any text whatever can be written and read back, with no unknown token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bundled_model.network import TARGET_NAME

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)

VOCABULARY_SIZE = 1536
MAX_POSITIONS = 4096

# Content may be a string, or the list of parts of an OpenAI message.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of `VOCABULARY_SIZE` tokens; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(seed), trainer)
    return tokenizer


def tokenizer_texts(seed: int) -> Iterator[str]:
    """What the merges are learned from: the corpus, plus every word of the lists with a space before it."""
    from bundled_model import words
    from bundled_model.exchanges import CHAT_EXCHANGES, FACTS
    from bundled_model.recall import ask, draw_document

    rng = Random(f"tokenizer/{seed}")
    single_words = (
        words.NAMES,
        words.THINGS,
        words.COLOURS,
        words.PLACES,
        words.FOODS,
        words.ANIMALS,
        words.ADJECTIVES,
        words.JOBS,
    )
    for pool in single_words:
        for word in pool:
            yield f" {word}" * 400
    for word in words.NAMES + words.THINGS + words.COLOURS:
        yield f"\n{word}\n" * 100
    for fact in FACTS:
        yield from fact.questions
        yield f"{fact.answer}\n" * 5
    for draw in CHAT_EXCHANGES.values():
        for _ in range(300):
            exchange = draw(rng, "training")
            yield f"{exchange.question}\nuser\n"
            yield f"{exchange.answer}\nassistant\n"
    for _ in range(60):
        document = draw_document(rng, 200, lambda line: len(line.split()) + 3)
        yield document.text
        for pair in document.pairs:
            exchange = ask(rng, pair, value_only=False)
            yield f"{exchange.question}\n{exchange.answer}"


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START_OF_TURN],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_bundled_tokenizer() -> Tokenizer:
    """The committed tokenizer of the target (the draft's is the same)."""
    path = files("headway_runtime") / "bundled" / TARGET_NAME / "tokenizer.json"
    return Tokenizer.from_str(path.read_text(encoding="utf-8"))
