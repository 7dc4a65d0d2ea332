"""A small OpenAI server of known delays and faults, the benchmark's command, and records made by hand."""

import asyncio
import json
import threading
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headway_bench.main import main
from headway_bench.prompts import COMMON_WORDS
from headway_bench.record import Record

TEMPLATE_TOKENS = 5
STATUS_FAULTS = {"status 500": (500, "out of order"), "status 503": (503, "the engine is starting")}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one answer goes. `events` are the tokens of each event; None: one each, as many as asked."""

    delay_seconds: float = 0.0
    pace_seconds: float = 0.0
    events: tuple[int, ...] | None = None
    fault: Literal[
        "", "status 500", "status 503", "drop first", "drop after 2", "error after 2", "no done", "hang"
    ] = ""
    usage: Literal["each event", "at the end", "never"] = "each event"


@dataclass(slots=True)
class SmallServer:
    """One running; `behave` says how the n-th request for an answer goes, n from 0, the probes included."""

    behave: Callable[[int], Behaviour] = lambda number: Behaviour()
    refuse_unknown: bool = False
    has_tokenize: bool = True
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_connections: int = 0
    num_at_once: int = 0
    most_at_once: int = 0

    def behaviour(self, **changes: Any) -> Behaviour:
        """For a `behave` of a test's own."""
        return Behaviour(**changes)

    def always(self, **changes: Any) -> None:
        """Let every answer go so."""
        behaviour = Behaviour(**changes)
        self.behave = lambda number: behaviour

    def sometimes(self, numbers: Container[int], **changes: Any) -> None:
        """Let the load's answers of these numbers go so (the probe comes before number 0), others plainly."""
        behaviour = Behaviour(**changes)
        self.behave = lambda number: behaviour if number - 1 in numbers else Behaviour()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The bodies of the load: all but the probes, which ask for one token."""
        return [body for body in self.bodies if body["max_tokens"] != 1]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                start, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self.answer(start.split()[1], headers, body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, path: str, headers: dict[str, str], raw: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection may be used again."""
        body = json.loads(raw) if raw else {}
        if path == "/version":
            return _write_json(writer, 200, {"version": "0.0-small"})
        if path == "/v1/models":
            return _write_json(writer, 200, {"data": [{"id": "small"}]})
        if path == "/tokenize" and self.has_tokenize:
            words = body["prompt"].split()
            return _write_json(
                writer, 200, {"count": len(words), "tokens": [sum(map(ord, w)) for w in words]}
            )
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return _write_json(writer, 404, {"error": {"message": "no such path"}})
        if self.refuse_unknown and "continuous_usage_stats" in (body.get("stream_options") or {}):
            return _write_json(writer, 400, {"error": {"message": "unknown: continuous_usage_stats"}})
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(headers)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            return await self.stream(self.behave(number), body, writer)
        finally:
            self.num_at_once -= 1

    async def stream(self, behaviour: Behaviour, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if behaviour.fault in STATUS_FAULTS:
            status, message = STATUS_FAULTS[behaviour.fault]
            return _write_json(writer, status, {"error": {"message": message}})
        if behaviour.fault == "drop first":
            return False
        if behaviour.fault == "hang":
            await asyncio.sleep(30)
            return False
        await asyncio.sleep(behaviour.delay_seconds)
        events = behaviour.events or (1,) * body["max_tokens"]
        is_chat = "messages" in body
        text = " ".join(m["content"] for m in body["messages"]) if is_chat else body["prompt"]
        prompt_tokens = len(text.split()) if isinstance(text, str) else len(text)
        usage = {"prompt_tokens": prompt_tokens + TEMPLATE_TOKENS * is_chat, "completion_tokens": 0}
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if is_chat:
            _write_event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number, tokens in enumerate(events):
            if number == 2 and behaviour.fault == "drop after 2":
                return False
            if number == 2 and behaviour.fault == "error after 2":
                _write_event(writer, {"error": {"message": "the engine died"}})
                writer.write(b"0\r\n\r\n")
                return True
            if number:
                await asyncio.sleep(behaviour.pace_seconds)
            usage["completion_tokens"] += tokens
            piece = {"delta": {"content": tokens * "la "}} if is_chat else {"text": tokens * "la "}
            event: dict[str, Any] = {"choices": [{"index": 0, **piece}]}
            if behaviour.usage == "each event":
                event["usage"] = dict(usage)
            _write_event(writer, event)
            await writer.drain()
        if behaviour.usage != "never":
            _write_event(writer, {"choices": [], "usage": usage})
        if behaviour.fault != "no done":
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
        writer.write(b"0\r\n\r\n")
        return True


def _write_json(writer: asyncio.StreamWriter, status: int, answer: object) -> bool:
    body = json.dumps(answer).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return True


def _write_event(writer: asyncio.StreamWriter, event: object) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def small_server() -> Iterator[SmallServer]:
    """A server in a thread of its own."""
    server = SmallServer()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listening.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


@dataclass(frozen=True, slots=True)
class Benchmarked:
    """How a run of the command ended, what it printed and reported."""

    status: int
    output: str
    errors: str
    report: dict[str, Any]

    @property
    def summary(self) -> dict[str, Any]:
        (point,) = self.report["points"]
        summary: dict[str, Any] = point["summary"]
        return summary

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [request for point in self.report["points"] for request in point["requests"]]


class RunBench(Protocol):
    def __call__(self, *flags: str, url: str = ...) -> Benchmarked: ...


@pytest.fixture
def run_bench(
    small_server: SmallServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> RunBench:
    """Runs `headway bench` with these flags, against the small server unless told otherwise."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*flags: str, url: str = "") -> Benchmarked:
        path = tmp_path / "report.json"
        own = ["--base-url", url or small_server.url, "--quiet", "--json", str(path), "--save-requests"]
        status = main([*own, *flags])
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        said = capsys.readouterr()
        return Benchmarked(status, said.out, said.err, report)

    return run


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer in which common words are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(COMMON_WORDS), *COMMON_WORDS] * 3, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def make_record() -> Callable[..., Record]:
    """A completed request, sent at 10 s, whose events came at the given milliseconds after that."""

    def make(
        event_milliseconds: Sequence[float] = (100, 110, 120),
        tokens: Sequence[int] | None = None,
        ended_milliseconds: float | None = None,
        **changes: Any,
    ) -> Record:
        counts = list(tokens or [1] * len(event_milliseconds))
        last = event_milliseconds[-1] if event_milliseconds else 0.0
        ended = last if ended_milliseconds is None else ended_milliseconds
        fields: dict[str, Any] = {
            "conversation": 0,
            "turn": 0,
            "is_warmup": False,
            "due_at": 10.0,
            "input_tokens_wanted": 8,
            "output_tokens_wanted": sum(counts),
            "sent_at": 10.0,
            "ended_at": 10 + ended / 1000,
            "token_times": array("d", [10 + at / 1000 for at in event_milliseconds]),
            "token_counts": array("L", counts),
            "count_source": "usage",
            "prompt_tokens": 8,
            "completion_tokens": sum(counts),
            "status": 200,
        }
        return Record(**{**fields, **changes})

    return make
