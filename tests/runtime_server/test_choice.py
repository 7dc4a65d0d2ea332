"""One choice: stop strings, min_tokens, and log-probabilities that keep what is held back to themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_runtime.choice import Choice, Delta, TextRules
from headway_runtime.request import FinishReason, RequestOutput, TokenLogprobs
from headway_runtime.tokenizer import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOGPROBS = TokenLogprobs(-0.5, ())


def feed(
    choice: Choice, token_ids: list[int], *, per_output: int = 1, with_logprobs: bool = True
) -> list[Delta]:
    """All tokens, the last ones with the end by length; stops where the choice does."""
    deltas = []
    for start in range(0, len(token_ids), per_output):
        group = tuple(token_ids[start : start + per_output])
        reason = FinishReason.LENGTH if start + per_output >= len(token_ids) else None
        logprobs = (LOGPROBS,) * len(group) if with_logprobs else ()
        deltas.append(choice.feed(RequestOutput("r", group, reason, logprobs)))
        if choice.finish_reason is not None:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab#é👩\u200d ", max_size=25),
    stops=st.lists(st.text("ab#é", min_size=1, max_size=3), max_size=2),
    per_output=st.integers(1, 4),
    with_stop=st.booleans(),
)
def test_log_probabilities_tell_no_more_than_the_text(
    byte_level_tokenizer: Tokenizer, *, text: str, stops: list[str], per_output: int, with_stop: bool
) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)
    token_ids = byte_level_tokenizer.encode(text).ids
    if not token_ids:
        return
    choice = Choice(0, "r", vocabulary, TextRules(tuple(stops), with_stop=with_stop))
    let_out, spelled = "", b""
    deltas = feed(choice, token_ids, per_output=per_output)
    for delta in deltas:
        let_out += delta.text
        spelled += b"".join(vocabulary.token_bytes(entry.token_id) for entry in delta.entries)
        assert let_out.encode().startswith(spelled)
    plain = Choice(0, "r", vocabulary, TextRules(tuple(stops), with_stop=with_stop))
    assert text_of(feed(plain, token_ids, per_output=per_output, with_logprobs=False)) == let_out
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert let_out == (text[: min(ends)[0 if with_stop else 1]] if ends else text)
    assert choice.finish_reason == ("stop" if ends else "length")
    assert choice.stop_reason in (stops if ends else [None])
    if not ends:
        assert spelled == text.encode()


def test_offsets_are_characters_of_the_answer(byte_level_tokenizer: Tokenizer) -> None:
    text = "é the 日本 fox"
    choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), TextRules())
    deltas = feed(choice, byte_level_tokenizer.encode(text).ids)
    entries = [entry for delta in deltas for entry in delta.entries]
    assert entries[0].text_offset == 0
    offsets = [entry.text_offset for entry in entries]
    assert offsets == sorted(offsets)
    assert offsets[-1] < len(text)


def test_stop_strings_count_only_after_min_tokens(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("a#b").ids
    assert len(token_ids) == 3
    choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), TextRules(("#",), min_tokens=2))
    assert text_of(feed(choice, token_ids * 2)) == "a#ba"
    assert (choice.finish_reason, choice.num_generated) == ("stop", 5)
    assert choice.is_stopped_by_text


@pytest.mark.parametrize(
    ("stops", "min_tokens", "want"),
    [
        pytest.param(("bc",), 2, "a", id="begins in the last of them"),
        pytest.param(("abc",), 2, "", id="begins in the first of them"),
        pytest.param(("ab", "bcd"), 2, "a", id="another one ended too early"),
        pytest.param(("ab",), 2, "abcd", id="ends too early, and comes again"),
        pytest.param(("bc",), 3, "abcdab", id="ends too early"),
        pytest.param(("b", "bcx", "dab"), 3, "abc", id="a held start that came to nothing"),
    ],
)
def test_a_stop_string_may_begin_within_min_tokens(
    stops: tuple[str, ...], min_tokens: int, want: str, byte_level_tokenizer: Tokenizer
) -> None:
    token_ids = [byte_level_tokenizer.encode(letter).ids[0] for letter in "abcdab"]
    choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), TextRules(stops, min_tokens=min_tokens))
    assert text_of(feed(choice, token_ids)) == want
    assert choice.finish_reason == ("length" if want == "abcdab" else "stop")


def test_what_the_end_cuts_off_is_still_let_out(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("ab##").ids
    choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), TextRules(("###",)))
    assert text_of(feed(choice, token_ids)) == "ab##"
    assert choice.finish_reason == "length"
    half = byte_level_tokenizer.encode("日").ids
    first_byte = [token_id for token_id in half if byte_level_tokenizer.id_to_token(token_id)][:1]
    if len(half) > 1:
        choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), TextRules())
        assert text_of(feed(choice, first_byte)) == "\ufffd"


def test_nothing_may_follow_the_end(byte_level_tokenizer: Tokenizer) -> None:
    choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), TextRules())
    feed(choice, [50])
    with pytest.raises(AssertionError, match="end"):
        choice.feed(RequestOutput("r", (50,)))


@pytest.mark.parametrize("with_stop", [False, True])
def test_a_stop_token_is_text_only_if_asked_for(byte_level_tokenizer: Tokenizer, *, with_stop: bool) -> None:
    token_ids = tuple(byte_level_tokenizer.encode("ab#").ids)
    rules = TextRules(
        with_stop=with_stop, stop_token_ids=frozenset({1, token_ids[-1]}), stop_reasons=frozenset(token_ids)
    )
    choice = Choice(0, "r", Vocabulary(byte_level_tokenizer), rules)
    delta = choice.feed(RequestOutput("r", token_ids, FinishReason.STOP, (LOGPROBS,) * 3))
    assert delta.text == ("ab#" if with_stop else "ab")
    assert (delta.finish_reason, delta.stop_reason) == ("stop", token_ids[-1])
    assert len(delta.entries) == 3, "its log-probability is told either way"
    own_end = Choice(0, "r", Vocabulary(byte_level_tokenizer), rules)
    assert own_end.feed(RequestOutput("r", (1,), FinishReason.STOP)).stop_reason is None
    # A grammar may end a choice with a token that is none of them.
    by_grammar = Choice(0, "r", Vocabulary(byte_level_tokenizer), rules)
    ended = by_grammar.feed(RequestOutput("r", token_ids[:2], FinishReason.STOP))
    assert (ended.text, ended.stop_reason) == ("ab", None)
