"""Reading streamed answers: what counts as a token, however the bytes are cut."""

import json
from typing import Any

import pytest

from headway_bench.answer import Answer, MalformedAnswerError, UnstreamedAnswer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more)


def read(*pieces: bytes) -> Answer:
    """An answer whose pieces arrive at 1 s, 2 s, ..."""
    answer = Answer(keep_texts=True)
    for number, piece in enumerate(pieces, start=1):
        answer.feed(piece, float(number))
    return answer


def test_the_first_token_is_the_first_with_content() -> None:
    answer = read(
        chat({"role": "assistant", "content": ""}),
        b": a comment\n\n",
        chat({"content": "Hel"}),
        chat({"content": "lo"}),
        chat({}, "stop"),
        event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2}),
        b"data: [DONE]\n\n",
    )
    assert list(answer.token_times) == [3, 4]
    assert "".join(answer.contents) == "Hello"
    assert (answer.prompt_tokens, answer.completion_tokens) == (9, 2)
    assert answer.finish_reason == "stop"
    assert answer.is_done


@pytest.mark.parametrize(
    "delta",
    [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0, "function": {}}]}],
)
def test_reasoning_and_tool_calls_are_content_but_no_part_of_the_history(delta: dict[str, Any]) -> None:
    answer = read(chat(delta), chat({"content": "so"}))
    assert list(answer.token_times) == [1, 2]
    assert "".join(answer.contents) == "so"


def test_completions_are_read_by_text_or_token_ids() -> None:
    answer = read(
        event(choices=[{"text": "a b", "token_ids": [5, 6]}]),
        event(choices=[{"text": "", "token_ids": [7]}]),
        event(choices=[{"text": "", "finish_reason": "length"}]),
    )
    assert list(answer.token_counts) == [2, 1]
    assert answer.count_source == "token_ids"


def test_usage_in_each_event_tells_how_many_tokens_came() -> None:
    answer = read(
        *(
            chat({"content": "x"}, usage={"prompt_tokens": 3, "completion_tokens": total})
            for total in (1, 4, 6)
        )
    )
    assert list(answer.token_counts) == [1, 3, 2]
    assert answer.count_source == "usage"


def test_without_any_telling_an_event_is_one_token() -> None:
    answer = read(chat({"content": "several words here"}), chat({"content": "."}))
    assert list(answer.token_counts) == [1, 1]
    assert answer.count_source == "events"


def test_events_cut_anywhere_are_the_same_answer() -> None:
    whole = (
        chat({"content": "é1"}).replace(b"\n", b"\r\n")
        + b'event: note\ndata: {"choices":\ndata: []}\n\n'
        + chat({"content": "2"}, "length")
        + b"data:[DONE]\n\n"
    )
    for cut in range(1, len(whole)):
        answer = read(whole[:cut], whole[cut:])
        assert "".join(answer.contents) == "é12", cut
        assert answer.is_done, cut
        assert all(at in (1.0, 2.0) for at in answer.token_times)


def test_an_event_is_as_late_as_its_last_byte() -> None:
    piece = chat({"content": "late"})
    assert list(read(piece[:-1], piece[-1:]).token_times) == [2]


def test_an_error_event_is_kept_with_its_message() -> None:
    assert read(event(error={"message": "out of memory", "code": 500})).error == "out of memory"
    assert read(event(error="plain")).error == "plain"


def test_cached_tokens_are_read() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(event(choices=[], usage=usage)).cached_tokens == 8


@pytest.mark.parametrize(
    "payload", [b"nonsense", b"[1]", b'{"choices": [3]}', b'{"choices": [], "usage": {"x": 1}}']
)
def test_what_is_no_event_of_the_endpoint_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        read(b"data: " + payload + b"\n\n")


def test_an_answer_in_one_piece_comes_when_its_body_ends() -> None:
    body = json.dumps(
        {
            "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        }
    ).encode()
    answer = UnstreamedAnswer(keep_texts=True)
    answer.feed(body[:20], 1.0)
    answer.feed(body[20:], 2.0)
    assert not answer.token_times
    answer.end(2.5)
    assert (list(answer.token_times), list(answer.token_counts)) == ([2.5], [3])
    assert (answer.contents, answer.finish_reason, answer.prompt_tokens) == (["Hello"], "stop", 9)


def test_a_whole_answer_that_is_none_is_told() -> None:
    answer = UnstreamedAnswer(keep_texts=False)
    answer.feed(b"<html>", 1.0)
    with pytest.raises(MalformedAnswerError, match="<html>"):
        answer.end(1.0)
