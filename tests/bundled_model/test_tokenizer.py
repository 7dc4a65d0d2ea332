"""The tokenizer: any text survives it, digits stand alone, and the chat template renders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundled_model.judging import Judged
from bundled_model.tokenizer import load_bundled_tokenizer

TOKENIZER = load_bundled_tokenizer()
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "12+34="},
]
RENDERED = (
    "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
    "<|im_start|>user\n12+34=<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_any_text_comes_back_byte_for_byte(text: str) -> None:
    token_ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["👨‍👩‍👧 and 👍🏽", "こんにちは\u0000\u200d", "  two  spaces\r\n\ttab ", "½ ﬁ Å e\u0301"]
)
def test_transformers_decodes_unusual_text_unchanged(target: Judged, text: str) -> None:
    token_ids = target.tokenizer(text).input_ids
    assert target.tokenizer.decode(token_ids) == text


def test_each_digit_is_a_token_of_its_own() -> None:
    assert TOKENIZER.encode("4711").tokens == ["4", "7", "1", "1"]


def test_the_chat_template_renders_turns_and_opens_the_answer(target: Judged) -> None:
    rendered = target.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered == RENDERED


def test_the_chat_template_takes_content_in_parts_and_content_that_is_missing(target: Judged) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "12"}, {"type": "text", "text": "+34="}]},
        {"role": "assistant", "content": None},
    ]
    rendered = target.tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"


def test_special_tokens_are_single_and_end_the_answer(target: Judged) -> None:
    ids = target.tokenizer("<|im_start|><|im_end|><|endoftext|>").input_ids
    assert len(ids) == 3
    assert target.model.generation_config.eos_token_id == [ids[1], ids[2]]
