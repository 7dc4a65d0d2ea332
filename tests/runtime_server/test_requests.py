"""What each option of a request does to the answer, and which answer a refused one gets."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "one two ### three"}


def post(server: RunningServer, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=30)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last one is the string [DONE] or an error."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "a stream ends with an empty line"
    assert all(block.startswith("data: ") for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@pytest.mark.parametrize(
    ("raw", "want_status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", 400),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", 400),
        (b'"' + b"a" * (17 * 2**20) + b'"', 413),
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "no text",
        "half a surrogate pair",
        "deep",
        "nested",
        "huge number",
        "large",
    ],
)
def test_a_body_that_is_no_request_is_refused(
    fake_server: RunningServer, raw: bytes, want_status: int
) -> None:
    response = httpx.post(
        f"{fake_server.url}/v1/completions",
        content=raw,
        headers={"Content-Type": "application/json"},
        timeout=30,
    )
    assert response.status_code == want_status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 1000


def test_a_body_of_unknown_length_is_bounded_too(fake_server: RunningServer) -> None:
    def parts() -> Any:
        for _ in range(17):
            yield b" " * 2**20

    try:
        response = httpx.post(
            f"{fake_server.url}/v1/completions",
            content=parts(),
            headers={"Content-Type": "application/json"},
            timeout=30,
        )
    except httpx.WriteError:
        return  # it closed the connection while the client was still sending
    assert response.status_code == 413


def test_errors_have_openais_body(fake_server: RunningServer) -> None:
    response = post(fake_server, "/v1/completions", {**COMPLETION, "model": "other"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    assert "'other'" in error["message"]
    for path, method, want in (("/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
        response = httpx.request(method, fake_server.url + path)
        assert response.status_code == want
        assert response.json()["error"]["message"]


def test_a_body_in_another_form_than_json_is_refused_by_what_it_says(fake_server: RunningServer) -> None:
    for headers in ({"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}):
        refused = post(fake_server, "/v1/completions", COMPLETION, **headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "unsupported_content_type")
        assert all(word in error["message"] for word in (*headers, *map(repr, headers.values())))
    plain = {"Content-Type": "application/JSON; charset=utf-8", "Content-Encoding": "identity"}
    assert post(fake_server, "/v1/completions", COMPLETION, **plain).is_success


def test_a_request_id_is_passed_on_or_made(fake_server: RunningServer) -> None:
    response = post(fake_server, "/v1/completions", COMPLETION, **{"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    made = post(fake_server, "/v1/completions", COMPLETION, **{"X-Request-Id": "not ok"})
    assert len(made.headers["x-request-id"]) == 32
    entry = fake_server.access_entry("mine-1")
    assert (entry["status"], entry["generated_tokens"], entry["outcome"]) == (200, 16, "length")
    assert entry["ttft_milliseconds"] <= entry["e2e_milliseconds"]


@pytest.mark.parametrize("change", [{}, {"stream": True}])
def test_a_stop_string_ends_the_answer_and_appears_nowhere(
    fake_server: RunningServer, change: dict[str, Any]
) -> None:
    body = {**COMPLETION, "max_tokens": 100, "stop": ["###"], "logprobs": 0, **change}
    response = post(fake_server, "/v1/completions", body)
    assert response.text.count("#") == 3, "its name is the reason, and stands nowhere else"
    if change:
        *chunks, done = events(response)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        choice = choices[-1]
        text, reason = "".join(choice["text"] for choice in choices), choice["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("one two ", "stop")
    assert choice["stop_reason"] == "###"
    sample = fake_server.sample_until(lambda sample: sample["gauges"]["running"] == 0)
    assert sample["gauges"]["kv_blocks_used"] == 0


def test_stop_strings_wait_for_min_tokens(fake_server: RunningServer) -> None:
    prompt = httpx.post(f"{fake_server.url}/tokenize", json={"prompt": "one two ### three"}).json()
    body = {**COMPLETION, "max_tokens": 100, "stop": "###", "min_tokens": prompt["count"]}
    choice = post(fake_server, "/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "one two ### threeone two "


def test_stop_tokens_and_ignore_eos(fake_server: RunningServer) -> None:
    def answer(**change: Any) -> tuple[int, str]:
        body = {"model": "tiny", "prompt": [40, 41, 1, 42], "max_tokens": 8, **change}
        answered = post(fake_server, "/v1/completions", body).json()
        return answered["usage"]["completion_tokens"], answered["choices"][0]["finish_reason"]

    assert answer() == (3, "stop")
    assert answer(ignore_eos=True) == (8, "length")
    assert answer(stop_token_ids=[41]) == (2, "stop")
    assert answer(stop_token_ids=[42], ignore_eos=True) == (4, "stop")
    assert answer(min_tokens=3) == (7, "stop")


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"prompt": ""}, "prompt='' is empty; send at least one token"),
        ({"prompt": []}, "prompt=[] is empty; send at least one prompt"),
        ({"prompt": [[]]}, "prompt=[] is empty; send at least one token"),
        ({"prompt": ["a", ""]}, "prompt[1]='' is empty; send at least one token"),
        (
            {"prompt": [100000]},
            "prompt holds token id 100000; this model's ids end at 398; use its tokenizer",
        ),
        ({"prompt": [[5], [100000]]}, "prompt[1] holds token id 100000"),
        ({"prompt": "a", "stop_token_ids": [100000]}, "stop_token_ids holds token id 100000"),
        ({"prompt": "a", "logit_bias": {"100000": 1}}, "logit_bias holds token id 100000"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias names '-1', which is no token id; use ids"),
        ({"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias names '05', which is no token id; use ids"),
        (
            {"prompt": "a", "min_tokens": 5, "max_tokens": 4},
            "min_tokens=5 is more than the answer may have (4)",
        ),
        (
            {"prompt": ["a"] * 20, "n": 20},
            "n=20 makes 20 prompts of 20 choices, more than the 128; send fewer",
        ),
        ({"prompt": ["a"] * 129}, "prompt makes 129 prompts of 1 choices, more than the 128; send fewer"),
        ({"prompt": "a " * 2000}, "prompt has 2001 tokens, but prompt and answer together may have 512"),
        ({"prompt": ["a", "a " * 2000]}, "prompt[1] has 2001 tokens, but prompt and answer together"),
    ],
)
def test_what_this_model_cannot_do_is_refused_and_counted(
    fake_server: RunningServer, body: dict[str, Any], want: str
) -> None:
    before = fake_server.sample()["counters"]
    response = post(fake_server, "/v1/completions", {"model": "tiny", **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(want)
    assert error["param"] == re.split("[= ]", want, maxsplit=1)[0]
    assert error["code"]
    after = fake_server.sample()["counters"]
    # Received, but no miss and no rejection: nothing that more replicas would have served.
    assert after["received"] == before["received"] + 1
    assert after["rejected"] == before["rejected"]


def test_a_prompt_of_megabytes_is_refused_without_encoding_it(fake_server: RunningServer) -> None:
    text = "a b " * (3 * 2**20)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        response = post(fake_server, path, {"model": "tiny", **body}, **{"X-Request-Id": f"large{path}"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "more than" in response.json()["error"]["message"]


def test_a_streamed_character_is_never_split(fake_server: RunningServer) -> None:
    text = "👩‍👩‍👧 日本語 🏳️‍🌈"
    count = httpx.post(f"{fake_server.url}/tokenize", json={"prompt": text}).json()["count"]
    body = {"model": "tiny", "prompt": text, "max_tokens": count, "stream": True}
    *chunks, done = events(post(fake_server, "/v1/completions", body))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


def test_choices_of_a_stream_end_once_each(fake_server: RunningServer) -> None:
    body = {**CHAT, "n": 3, "max_tokens": 5, "stream": True}
    *chunks, done = events(post(fake_server, "/v1/chat/completions", body))
    assert done == "[DONE]"
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "length"


def test_an_engine_error_is_a_500_or_the_last_event(fake_server: RunningServer) -> None:
    before = fake_server.sample()["counters"]
    whole = post(fake_server, "/v1/completions", {"model": "tiny", "prompt": [3, 5]})
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_error")
    streamed = post(fake_server, "/v1/completions", {"model": "tiny", "prompt": [4, 50], "stream": True})
    assert streamed.status_code == 200
    *chunks, last = events(streamed)
    assert last["error"]["code"] == "engine_error"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    after = fake_server.sample()["counters"]
    assert after["errors"] == before["errors"] + 2


def test_what_a_gateway_waited_counts_into_the_ttft(fake_server: RunningServer) -> None:
    post(
        fake_server, "/v1/completions", COMPLETION,
        **{"X-Headway-Waited-Milliseconds": "5000", "X-Request-Id": "waited-long"},
    )  # fmt: skip
    entry = fake_server.access_entry("waited-long")
    assert entry["waited_at_gateway_milliseconds"] == 5000
    assert 5000 <= entry["ttft_milliseconds"] < 15000
    for nonsense in ("nan", "-1", "x", ""):
        post(
            fake_server, "/v1/completions", COMPLETION,
            **{"X-Headway-Waited-Milliseconds": nonsense, "X-Request-Id": f"waited-{nonsense}-"},
        )  # fmt: skip
        entry = fake_server.access_entry(f"waited-{nonsense}-")
        assert entry["ttft_milliseconds"] < 5000
        assert "waited_at_gateway_milliseconds" not in entry, "what does not apply is left out"


def test_only_bearers_of_a_key_may_use_the_model_and_no_key_file_means_no_admin(
    start_server: StartServer, tmp_path: Any
) -> None:
    (tmp_path / "keys").write_text("from-file-1\n\n  from-file-2  \n", encoding="utf-8")
    server = start_server(
        "--api-key=one", "--api-key=two", f"--api-key-file={tmp_path / 'keys'}",
        environment={"HEADWAY_API_KEY": "from-environment"}, with_admin=False,
    )  # fmt: skip
    for key in ("one", "two", "from-file-1", "from-file-2", "from-environment"):
        assert post(server, "/v1/completions", COMPLETION, Authorization=f"Bearer {key}").is_success
    for headers in (
        {},
        {"Authorization": "Bearer on"},
        {"Authorization": "Basic one"},
        {"Authorization": ""},
    ):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            refused = post(server, path, COMPLETION, **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/ping", "/ready", "/version", "/metrics"):
        assert httpx.get(server.url + path).is_success
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    for method, path in (("GET", "sample"), ("GET", "limits"), ("PATCH", "limits")):
        off = server.admin(method, path, {})
        assert off.status_code == 403
        assert "--admin-public-key-file" in off.json()["error"]["message"]
