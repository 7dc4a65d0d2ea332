"""What goes with a choice's text: echoed prompts, token ids and running usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from headway_runtime.choice import Delta, TextRules
from headway_runtime.request import FinishReason, RequestOutput, TokenLogprobs
from headway_runtime.server.choice_details import (
    DetailedChoice,
    Details,
    EchoedPrompt,
    place_tokens,
    spell_prompt,
)
from headway_runtime.tokenizer import Tokenizer, Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

SCORE = TokenLogprobs(-0.5, ((7, -0.25), (8, -0.5)))


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: tokenizers.Tokenizer,
    byte_fallback_tokenizer: tokenizers.Tokenizer,
) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    chosen = byte_level_tokenizer if request.param == "byte level" else byte_fallback_tokenizer
    chosen.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), special=st.booleans())
def test_the_text_of_token_ids_is_the_librarys_and_offsets_lie_in_it(
    tokenizer: Tokenizer, *, data: st.DataObject, special: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=12))
    spelled = spell_prompt(ids, tokenizer, special_tokens=special)
    assert spelled.text == tokenizer.decode(ids, skip_special_tokens=not special)
    assert len(spelled.offsets) == len(ids)
    assert list(spelled.offsets) == sorted(spelled.offsets)
    assert all(0 <= offset <= len(spelled.text) for offset in spelled.offsets)


def choice_with(
    tokenizer: tokenizers.Tokenizer, details: Details, rules: TextRules | None = None
) -> DetailedChoice:
    return DetailedChoice(0, "r", Vocabulary(tokenizer), rules or TextRules(), details)


def feed_all(choice: DetailedChoice, token_ids: list[int]) -> list[Delta]:
    deltas = []
    for place, token_id in enumerate(token_ids):
        is_last = place == len(token_ids) - 1
        output = RequestOutput(
            "r",
            (token_id,),
            FinishReason.LENGTH if is_last else None,
            (SCORE,),
            num_cached_tokens=2 if place == 0 else 0,
            prompt_logprobs=(None, SCORE) if place == 0 else None,
        )
        deltas.append(choice.feed(output))
        if choice.finish_reason:
            break
    return deltas


def test_the_prompt_comes_once_and_first(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    details = Details((50, 51), EchoedPrompt("ab", (0, 1)), num_logprobs=1)
    first, second = feed_all(choice_with(byte_level_tokenizer, details), [52, 53])
    assert first.text.startswith("ab")
    assert not second.text.startswith("ab")
    entries = first.entries + second.entries
    assert [entry.text_offset for entry in entries] == [0, 1, 2, 3]
    assert entries[0].logprobs is None
    assert entries[1].logprobs == TokenLogprobs(-0.5, ((7, -0.25),)), "as many as were asked for"


def test_no_token_id_follows_a_stop_string(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("ab##c").ids
    choice = choice_with(byte_level_tokenizer, Details((50, 51), with_token_ids=True), TextRules(("#",)))
    deltas = feed_all(choice, ids)
    sent = [token_id for delta in deltas for token_id in (delta.details and delta.details.token_ids) or ()]
    assert sent == choice.token_ids == ids[: len(sent)]
    assert (choice.stop_reason, choice.finish_reason) == ("#", "stop")
    assert [bool(delta.details and delta.details.prompt_token_ids) for delta in deltas][:2] == [True, False]


def test_usage_grows_with_the_tokens(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    deltas = feed_all(choice_with(byte_level_tokenizer, Details((50, 51), with_usage=True)), [52, 53, 54])
    assert [delta.details.usage for delta in deltas if delta.details] == [(2, 1, 2), (2, 2, 2), (2, 3, 2)]


def test_a_hidden_answer_has_neither_text_nor_tokens(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    details = Details((50, 51), EchoedPrompt("ab", (0, 1)), num_logprobs=0, hides_answer=True)
    choice = choice_with(byte_level_tokenizer, details)
    (delta,) = feed_all(choice, [52])
    assert (delta.text, len(delta.entries), delta.finish_reason) == ("ab", 2, "length")
    assert choice.num_generated == 0


@pytest.fixture(scope="module")
def encoders(
    byte_level_tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Tokenizer]:
    """By whether a token's own spaces are left out of its place."""
    found = {}
    for trims in (False, True):
        folder: Path = tmp_path_factory.mktemp("encoder")
        copy = tokenizers.Tokenizer.from_str(byte_level_tokenizer.to_str())
        copy.post_processor = processors.ByteLevel(trim_offsets=trims)
        copy.save(str(folder / "tokenizer.json"))
        found[trims] = Tokenizer(folder)
    return found


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab é日👩\u200d \n", max_size=20), trims=st.booleans())
def test_offsets_of_a_text_are_where_its_tokens_begin(
    encoders: dict[bool, Tokenizer], *, text: str, trims: bool
) -> None:
    tokenizer = encoders[trims]
    ids = tokenizer.encode(text, add_special_tokens=True)
    placed = place_tokens(text, ids, tokenizer, add_special_tokens=True)
    assert placed.text == text
    before = 0
    for token_id, offset in zip(ids, placed.offsets, strict=True):
        # In bytes: a token begins in the character that its first byte is of.
        assert len(text[:offset].encode()) <= before < len(text[: offset + 1].encode())
        before += len(tokenizer.vocabulary.token_bytes(token_id))


def test_a_text_that_names_special_tokens_is_placed_by_the_tokenizer(encoders: dict[bool, Tokenizer]) -> None:
    text = "a<|bos|>日b"
    ids = encoders[False].encode(text, add_special_tokens=True)
    placed = place_tokens(text, ids, encoders[False], add_special_tokens=True)
    assert placed.text == text
    assert placed.offsets[:2] == [0, 1]
    assert placed.offsets[-1] == len(text) - 1
