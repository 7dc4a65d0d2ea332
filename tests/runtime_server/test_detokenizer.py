"""Streaming text is the library's text, cut only between characters and never inside a stop string."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from headway_runtime.detokenizer import Detokenizer, StopStrings
from headway_runtime.errors import ConfigError
from headway_runtime.tokenizer import Vocabulary, read_decoder_shape

SAMPLES = [
    "plain words",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "日本語 and Ünïcödé, 한국어, עברית",
    "\u200d\ufe0f\u0301 joiners alone",
    "a\x00b\r\n\ttabs",
]


def token_id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def streamed(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    """What a client would get, with the tokens coming in groups of the given sizes, over and over."""
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    parts, position = [], 0
    for size in itertools.cycle(sizes):
        if position >= len(token_ids):
            break
        parts.append(detokenizer.push(token_ids[position : position + size]))
        position += size
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("text", SAMPLES)
def test_no_part_of_a_valid_text_splits_a_character(byte_level_tokenizer: Tokenizer, text: str) -> None:
    token_ids = byte_level_tokenizer.encode(text).ids
    parts = streamed(byte_level_tokenizer, token_ids, [1])
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.sampled_from(SAMPLES), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_byte_level_stream_of_any_text_is_that_text(
    byte_level_tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    token_ids = byte_level_tokenizer.encode(text).ids
    assert "".join(streamed(byte_level_tokenizer, token_ids, sizes)) == text


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_level_stream_of_any_tokens_is_the_full_decode(
    byte_level_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Random ids make broken byte sequences, special tokens and added tokens; ids past the end too."""
    size = byte_level_tokenizer.get_vocab_size()
    single_bytes = st.integers(2, 257)
    token_ids = data.draw(st.lists(single_bytes | st.integers(0, size + 3), max_size=40))
    want = byte_level_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(streamed(byte_level_tokenizer, token_ids, [1])) == want


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_fallback_stream_of_any_tokens_is_the_full_decode_after_a_prompt(
    byte_fallback_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    size = byte_fallback_tokenizer.get_vocab_size()
    characters = st.sampled_from(["👩‍👩‍👧", "é", "日", "ß", "a", " "]).map(
        lambda text: [3 + byte for byte in text.encode()]
    )
    chunk = characters | st.lists(st.integers(0, size + 3), max_size=4)
    token_ids = list(itertools.chain.from_iterable(data.draw(st.lists(chunk, max_size=15))))
    prompt = token_id_of(byte_fallback_tokenizer, "c")
    want = byte_fallback_tokenizer.decode([prompt, *token_ids], skip_special_tokens=True)
    assert "c" + "".join(streamed(byte_fallback_tokenizer, token_ids, [1])) == want


def test_a_leading_space_survives(byte_fallback_tokenizer: Tokenizer) -> None:
    token_id = token_id_of(byte_fallback_tokenizer, "▁the")
    assert "".join(streamed(byte_fallback_tokenizer, [token_id, token_id], [1])) == " the the"


def test_a_decoder_that_looks_at_neighbours_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="WordPiece"):
        read_decoder_shape({"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ConfigError, match="null"):
        read_decoder_shape(None)


def test_metaspace_is_understood() -> None:
    shape = read_decoder_shape({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})
    assert (shape.kind, shape.space_mark) == ("text", "▁")
    assert decoders.Metaspace().decode(["▁a", "▁b"]) == "a b"


STOPS = st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab#", max_size=30), stops=STOPS, cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4)
)
def test_what_a_stop_string_cuts_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    want_text, want_stop = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    finder = StopStrings(stops)
    parts, position = [], 0
    for cut in itertools.cycle(cuts):
        if position >= len(text):
            break
        parts.append(finder.push(text[position : position + cut]))
        position += cut
        assert want_text.startswith("".join(parts))
    parts.append(finder.finish())
    assert ("".join(parts), finder.matched) == (want_text, want_stop)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["###"])
    assert [finder.push(part) for part in ("a#", "b", "##", "c#", "##d")] == ["a", "#b", "", "##c", ""]
    assert finder.matched == "###"
    assert finder.finish() == ""
