"""Where one request's time went: `usage.headway` for who asks, the access line for operators, and its id."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway_runtime.request import RequestOutput
from headway_runtime.server.log import AccessEntry
from headway_runtime.server.request_times import RequestTimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime_server.conftest import RunningServer

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "ignore_eos": True}
PARTS = {
    "queue_milliseconds",
    "prefill_milliseconds",
    "ttft_milliseconds",
    "first_decode_milliseconds",
    "tpot_milliseconds",
    "itl_p50_milliseconds",
    "itl_p95_milliseconds",
    "itl_p99_milliseconds",
    "e2e_milliseconds",
}
BETWEEN_TOKENS = {name for name in PARTS if name.startswith(("first_decode", "tpot", "itl"))}


@pytest.fixture(scope="module")
def client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", timeout=30) as one:
        yield one


def post(
    server: RunningServer, body: object, path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=30)


def check(timings: dict[str, float]) -> None:
    assert timings.keys() == PARTS
    assert all(value >= 0 for value in timings.values())
    assert timings["queue_milliseconds"] + timings["prefill_milliseconds"] <= timings["ttft_milliseconds"] + 1
    assert timings["ttft_milliseconds"] <= timings["e2e_milliseconds"]
    assert timings["tpot_milliseconds"] * 5 <= timings["e2e_milliseconds"] + 1
    gaps = [timings[f"itl_p{percent}_milliseconds"] for percent in (50, 95, 99)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= timings["tpot_milliseconds"] * 5 / 3 + 0.01
    assert timings["tpot_milliseconds"] - 0.01 <= gaps[-1]


def test_usage_says_where_the_time_went_when_asked(real_server: RunningServer) -> None:
    check(post(real_server, {**BODY, "return_timings": True}).json()["usage"]["headway"])


@pytest.mark.parametrize("answer", [None, False])
def test_usage_says_nothing_of_time_unasked(real_server: RunningServer, answer: object) -> None:
    assert "headway" not in post(real_server, {**BODY, "return_timings": answer}).json()["usage"]


def test_the_usage_chunk_of_a_chat_says_it_through_the_openai_client(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_timings": True, "ignore_eos": True},
        )
    )
    usage: Any = chunks[-1].usage
    check(usage.model_extra["headway"])


def test_times_of_requests_are_those_of_the_engines_histograms(real_server: RunningServer) -> None:
    """However many tokens come at once to a process that is busy with 24 answers."""

    def sums() -> dict[str, float]:
        page = httpx.get(f"{real_server.url}/metrics").text
        samples = (one for family in text_string_to_metric_families(page) for one in family.samples)
        return {
            one.name: one.value for one in samples if one.name.endswith(("_seconds_sum", "_seconds_count"))
        }

    before = sums()
    with ThreadPoolExecutor(24) as threads:
        bodies = [{**BODY, "prompt": f"{number} abc", "return_timings": True} for number in range(24)]
        said = [one.json()["usage"]["headway"] for one in threads.map(partial(post, real_server), bodies)]
    grown = {name: value - before[name] for name, value in sums().items()}
    for ours, histogram in (
        ("queue", "headway_queue_time_seconds"),
        ("prefill", "headway_prefill_time_seconds"),
        ("first_decode", "headway_first_decode_time_seconds"),
        ("tpot", "headway_time_per_output_token_seconds"),
    ):
        assert grown[f"{histogram}_count"] == len(said)
        seconds = sum(one[f"{ours}_milliseconds"] for one in said) / 1000.0
        assert grown[f"{histogram}_sum"] == pytest.approx(seconds, abs=1e-5 * len(said)), ours


def test_one_token_has_no_gap_between_tokens(real_server: RunningServer) -> None:
    usage = post(real_server, {**BODY, "max_tokens": 1, "return_timings": True}).json()["usage"]
    assert usage["headway"].keys() == PARTS - BETWEEN_TOKENS


def test_gaps_between_tokens_are_those_of_all_answers_and_shared_by_tokens_that_come_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway_runtime.server.request_times.time.monotonic", lambda: 99.0)
    log = AccessEntry("id", "POST", "/", 200)
    times = RequestTimes(9.0, log)
    for request_id in ("a", "b"):
        first = RequestOutput(request_id, (1,), computed_at=10.0, queue_seconds=0.25, prefill_seconds=0.5)
        times.first_token(first)
    times.later_tokens("a", 1, 10.1)
    times.later_tokens("a", 3, 10.4)  # guesses that came true: 3 gaps of 0.1 s
    times.later_tokens("a", 0, 0.0)
    times.later_tokens("b", 1, 11.0)
    times.ended("a", 5, "stop")
    times.ended("b", 2, "stop")
    said = times.as_usage()
    assert said["first_decode_milliseconds"] == 1000.0
    assert (said["itl_p50_milliseconds"], said["itl_p95_milliseconds"]) == (100.0, 1000.0)
    assert log.itl_p99_milliseconds == 1000.0


def test_a_stream_without_usage_cannot_say_it(real_server: RunningServer) -> None:
    response = post(real_server, {**BODY, "stream": True, "return_timings": True})
    assert response.status_code == 400
    assert "stream_options.include_usage=true" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_access_line_has_tokens_times_and_ends(real_server: RunningServer, *, stream: bool) -> None:
    request_id = f"all-of-it/{stream}"
    response = post(real_server, {**BODY, "n": 2, "stream": stream}, **{"X-Request-Id": request_id})
    assert response.headers["x-request-id"] == request_id
    entry = real_server.access_entry(request_id)
    assert {key for key in entry if key.endswith("_milliseconds")} >= PARTS
    # A prompt counts once, however many answers it gets.
    assert (entry["prompt_tokens"], entry["generated_tokens"]) == (len("abc"), 12)
    assert (entry["outcome"], entry["finish_reasons"]) == ("length", ["length", "length"])
    assert (entry["path"], entry["status"]) == ("/v1/completions", 200)
    assert entry["ttft_milliseconds"] <= entry["e2e_milliseconds"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", BODY, 200),
        ("/v1/completions", {**BODY, "stream": True}, 200),
        ("/v1/completions", {"prompt": 5}, 400),
        ("/v1/completions", {**BODY, "model": "other"}, 404),
        ("/nowhere", {}, 404),
        ("/admin/sample", {}, 405),
        ("/tokenize", {"prompt": "abc"}, 200),
    ],
)
def test_every_answer_carries_the_id_that_its_request_came_with(
    fake_server: RunningServer, path: str, body: object, status: int
) -> None:
    response = post(fake_server, body, path, **{"X-Request-Id": "given:1+2=3"})
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["given:1+2=3"]


@pytest.mark.parametrize(
    "given",
    ["", "two words", "a" * 129, 'quote"', "line\\n", "{json}", "é"],
    ids=lambda text: repr(text)[:12],
)
def test_an_id_that_no_log_should_hold_is_replaced(fake_server: RunningServer, given: str) -> None:
    response = httpx.get(f"{fake_server.url}/v1/models", headers=[(b"X-Request-Id", given.encode())])
    made = response.headers["x-request-id"]
    assert len(made) == 32
    assert int(made, 16)
    assert fake_server.access_entry(made)["status"] == 200


def test_access_lines_are_json_on_one_line(fake_server: RunningServer) -> None:
    post(fake_server, BODY, **{"X-Request-Id": "one-line"})
    fake_server.access_entry("one-line")
    lines = [line for line in fake_server.log.splitlines() if "headway.access" in line]
    assert lines
    assert all(json.loads(line.partition("headway.access ")[2])["request_id"] for line in lines)


def test_a_stream_that_comes_all_at_once_says_when_it_began(client: openai.OpenAI) -> None:
    [*_, last] = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_timings": True},
    )
    assert last.usage is not None
    assert last.usage.model_extra is not None
    timings = last.usage.model_extra["headway"]
    assert timings["ttft_milliseconds"] <= timings["e2e_milliseconds"]
