"""Answers of a prescribed form from a live server, and grammars that only the engine can find unusable."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest
from tests.runtime_server.conftest import connect

# Longer than an answer of a prescribed form takes beside other work on a slow machine.
LONGEST_SECONDS = 5
ENDLESS = {"type": "integer", "multipleOf": 100000007}
# A few hundred characters whose patterns, all of which a text must match, have 2 to the 24th states together.
INTERSECTED = {
    "allOf": [{"type": "string", "pattern": f".*[{chr(97 + one)}].{{{one + 5}}}"} for one in range(24)]
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "endless", "schema": ENDLESS}}


@pytest.fixture(scope="module")
def impatient(start_shared_server: Any) -> Any:
    """A server that compiles a grammar for a second at most."""
    return start_shared_server("--structured-output-timeout-seconds=1", "--num-threads=1", fake=False)


@pytest.fixture(scope="module")
def patient(start_shared_server: Any) -> Any:
    """One that does so for LONGEST_SECONDS."""
    limit = f"--structured-output-timeout-seconds={LONGEST_SECONDS}"
    return start_shared_server(limit, "--num-threads=1", fake=False)


@pytest.fixture(scope="module")
def client(impatient: Any) -> Iterator[openai.OpenAI]:
    with connect(impatient) as made:
        yield made


@pytest.fixture(scope="module")
def patient_client(patient: Any) -> Iterator[openai.OpenAI]:
    with connect(patient) as made:
        yield made


def complete(client: openai.OpenAI, **changes: Any) -> Any:
    create: Any = client.completions.create
    return create(**({"model": "tiny", "prompt": "a", "max_tokens": 200} | changes))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_schema_is_kept_whatever_the_model_wants(client: openai.OpenAI, temperature: float) -> None:
    schema = {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 2, "maxItems": 3}
    wanted = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    for seed in range(3):
        answer = complete(
            client, temperature=temperature, seed=seed, n=2, extra_body={"response_format": wanted}
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert 2 <= len(json.loads(choice.text)) <= 3
            assert set(json.loads(choice.text)) <= {"x", 1, None}


def test_a_stream_matches_its_expression(client: openai.OpenAI) -> None:
    form = {"structured_outputs": {"regex": "[ab]{4,9}!"}}
    chunks = list(complete(client, stream=True, temperature=1.0, seed=1, extra_body=form))
    assert re.fullmatch("[ab]{4,9}!", "".join(chunk.choices[0].text for chunk in chunks))
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


def rejected(server: Any) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=10).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if not line.startswith("#") and "rejected" in line and 'reason="invalid"' in line
    )


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (True, 1), (False, 3)])
def test_endless_grammar_is_400_and_nobody_else_waits_for_it(
    patient_client: openai.OpenAI, patient: Any, stream: Any, n: int
) -> None:
    # What the processes for grammars take to start is not looked at here.
    complete(patient_client, extra_body={"structured_outputs": {"choice": ["a"]}})
    before = rejected(patient)
    caught: list[openai.BadRequestError] = []

    def ask() -> None:
        with pytest.raises(openai.BadRequestError) as error:
            complete(patient_client, stream=stream, n=n, extra_body={"response_format": FORMAT})
        caught.append(error.value)

    thread = threading.Thread(target=ask)
    thread.start()
    rounds: list[float] = []
    while thread.is_alive():
        started_at = time.monotonic()
        complete(patient_client, max_tokens=3)
        complete(patient_client, extra_body={"structured_outputs": {"choice": ["a", f"b{len(rounds)}"]}})
        rounds.append(time.monotonic() - started_at)
    thread.join()
    assert min(rounds) < LONGEST_SECONDS
    (error,) = caught
    assert (error.param, error.code) == ("response_format", "invalid_grammar")
    assert f"not compiled within {LONGEST_SECONDS} s" in error.message
    assert "response_format='{" in error.message, "with its value"
    assert rejected(patient) == before + n
    patient.sample_until(lambda sample: sample["gauges"]["running"] == sample["gauges"]["waiting"] == 0)


def asked_by(field: str, number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body in which INTERSECTED is asked for by that field; another one for each number."""
    schema = {**INTERSECTED, "title": str(number)}
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    tool = {"name": "f", "parameters": {"properties": {"a": schema}}}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "response_format": (
            "/v1/chat/completions",
            {
                **chat,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            },
        ),
        "structured_outputs.json": (
            "/v1/completions",
            {"model": "tiny", "prompt": "a", "structured_outputs": {"json": schema}},
        ),
        "tools": (
            "/v1/chat/completions",
            {**chat, "tool_choice": "required", "tools": [{"type": "function", "function": tool}]},
        ),
        "text.format": (
            "/v1/responses",
            {
                "model": "tiny",
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
            },
        ),
    }
    return bodies[field]


@pytest.mark.parametrize("field", ["response_format", "structured_outputs.json", "tools", "text.format"])
def test_a_schema_that_takes_all_time_and_memory_is_given_up_and_costs_nobody_else(
    client: openai.OpenAI, impatient: Any, field: str
) -> None:
    """The HTTP process never has the library look at it: that could be neither stopped nor limited."""
    front = psutil.Process(impatient.process.pid)
    resident = front.memory_info().rss
    with ThreadPoolExecutor(5) as threads:
        refused = []
        for path, body in (asked_by(field, number) for number in range(5)):
            refused.append(threads.submit(httpx.post, f"{impatient.url}{path}", json=body, timeout=60))
        num_served = 0
        while not all(one.done() for one in refused):
            complete(client, max_tokens=1, prompt=f"{num_served % 10}" * 400)
            num_served += 1
    assert num_served > 1
    for one in refused:
        error = one.result().json()["error"]
        assert (one.result().status_code, error["param"], error["code"]) == (400, field, "invalid_grammar")
    busy = sum(front.cpu_times()[:2])
    complete(client, max_tokens=1)
    assert sum(front.cpu_times()[:2]) - busy < 0.5, "nothing goes on after the answer"
    assert front.memory_info().rss - resident < 64 * 2**20


def test_engine_names_the_field_when_allowed_tokens_leave_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"structured_outputs": {"regex": "[0-9]"}, "allowed_token_ids": [5]})
    assert (caught.value.param, caught.value.code) == ("allowed_token_ids", "invalid_value")
    assert "allowed_token_ids=[5] cannot be enforced" in caught.value.message
