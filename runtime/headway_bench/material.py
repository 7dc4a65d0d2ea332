"""Puts together what is asked: reads the files, learns how to write prompts, and makes each point's load.

The order matters: the writer needs a tokenizer or the server, the first request needs a prompt, and only its
answer tells how many tokens the server adds, by which all later prompts are made shorter.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway_bench.arrivals import arrival_times, steady
from headway_bench.config import BenchConfig, PromptConfig
from headway_bench.dataset import Exchange, read_dataset
from headway_bench.errors import OptionsError, TargetError
from headway_bench.http_client import Client
from headway_bench.probe import (
    FirstAnswer,
    ServerFacts,
    common_token_ids,
    counting_by_server,
    find_server,
    tokenize,
    try_requests,
)
from headway_bench.prompts import (
    COMMON_WORDS,
    CountTokens,
    TokenIds,
    Words,
    Writer,
    candidates_of,
    draw_row,
    words_of_one_token,
)
from headway_bench.spread import fixed
from headway_bench.tokenizer import LocalTokenizer
from headway_bench.traces import block_tokens, read_trace, replay_rates, replay_requests
from headway_bench.workload import Shape, Stream, Workload, from_dataset, from_trace, random_stream, synthetic
from headway_traces import TraceFile, TraceRequest

DEFAULT_INPUT_TOKENS = 128
DEFAULT_OUTPUT_TOKENS = 64
CHARACTERS_PER_TOKEN = 4
_PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Files:
    """What was read from disk. `requests` is the trace's slice; empty for a trace of rates or none."""

    tokenizer: LocalTokenizer | None
    trace: TraceFile | None
    requests: tuple[TraceRequest, ...]
    conversations: tuple[tuple[Exchange, ...], ...]

    def count(self, text: str) -> int:
        """Tokens of a text: exact with a tokenizer, else by its length."""
        if self.tokenizer is not None:
            return self.tokenizer.count(text)
        return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


@dataclass(frozen=True, slots=True)
class Material:
    """All that is needed to make a point's load. `overhead_tokens` is what the server adds to a message."""

    files: Files
    facts: ServerFacts
    first: FirstAnswer
    writer: Writer
    overhead_tokens: int


def read_files(config: BenchConfig) -> Files:
    """Read what the config names, and refuse what does not go with what is in it."""
    prompts = config.prompts
    tokenizer = None if prompts.tokenizer is None else LocalTokenizer(prompts.tokenizer)
    trace = None if prompts.trace is None else read_trace(prompts.trace)
    requests: tuple[TraceRequest, ...] = ()
    if trace is not None and trace.requests:
        _refuse_beside_requests(prompts)
        random = random_stream(config.seed, Stream.CHECKS)
        requests = replay_requests(trace, prompts.replay, random)
    elif trace is not None and (config.load.request_rates or config.load.concurrencies):
        raise OptionsError(
            "a trace of rates says how fast to send; leave out --request-rate and --concurrency"
        )
    files = Files(tokenizer, trace, requests, ())
    if prompts.dataset is None:
        return files
    conversations = read_dataset(prompts.dataset)
    most = prompts.replay.max_input_tokens
    if most is not None:
        conversations = tuple(c for c in conversations if files.count(c[0].question) <= most)
    if not conversations:
        raise OptionsError(f"--max-input-length={most} leaves no conversation of the data set")
    return Files(tokenizer, trace, requests, conversations)


async def learn(client: Client, config: BenchConfig, files: Files) -> Material:
    """Ask the server what must be known; raises TargetError where it cannot be benchmarked so."""
    facts = await find_server(client, config.server)
    writer = await _writer(client, config, files, facts.model)
    row = draw_row(writer.size, _PROBE_TOKENS, (config.seed, Stream.CHECKS))
    first = await try_requests(client, config.server, facts.model, writer.write(row))
    overhead = 0
    if isinstance(writer, Words) and writer.length_source == "words":
        if first.prompt_tokens is not None:
            # The template's share is spread over the words: the lengths are approximate anyway.
            ratio = first.prompt_tokens / _PROBE_TOKENS
            writer = Words(writer.openers, writer.followers, "words", ratio)
    elif first.prompt_tokens is not None:
        overhead = max(0, first.prompt_tokens - _PROBE_TOKENS)
    return Material(files, facts, first, writer, overhead)


def workload_of(config: BenchConfig, material: Material, point: int) -> Workload:
    """What is asked in one point of a sweep."""
    prompts, files = config.prompts, material.files
    if files.requests:
        size = max(1, round(block_tokens(files.requests) * prompts.replay.length_scale))
        return from_trace(files.requests, size, material.writer, material.overhead_tokens, config.seed, point)
    shape = Shape(
        prompts.input_length or fixed(DEFAULT_INPUT_TOKENS),
        prompts.output_length or fixed(DEFAULT_OUTPUT_TOKENS),
        prompts.turns,
        prompts.think_seconds,
        prompts.num_prefixes,
        prompts.prefix_length,
    )
    if files.conversations:
        return from_dataset(
            files.conversations, shape, prompts.output_length, files.count, config.seed, point
        )
    return synthetic(shape, material.writer, material.overhead_tokens, config.seed, point)


def arrivals_of(config: BenchConfig, files: Files, request_rate: float | None, point: int) -> Iterator[float]:
    """When conversations begin in an open loop: at a rate, or (None) as the trace has it."""
    load = config.load
    if request_rate is None and files.requests:
        return (request.at_seconds for request in files.requests)
    if request_rate is not None:
        segments = steady(request_rate, load.ramp_seconds)
    else:
        assert files.trace is not None, "the options ask for a rate, users or a trace"
        segments = replay_rates(files.trace, config.prompts.replay, load.burstiness)
    random = random_stream(config.seed, point, Stream.ARRIVALS)
    return arrival_times(segments, load.arrivals, load.burstiness or 1.0, random)


async def _writer(client: Client, config: BenchConfig, files: Files, model: str) -> Writer:
    wanted = config.prompts.length_source
    random = random_stream(config.seed, Stream.CHECKS)

    async def learned(candidates: list[str], count: CountTokens, source: str) -> Words | None:
        def learn_words() -> Words | None:
            words = words_of_one_token(candidates, count, "tokenizer" if source == "tokenizer" else "server")
            if words is not None:
                words.check(count, random)
            return words

        return await asyncio.to_thread(learn_words)

    words: Words | None = None
    if wanted == "ids":
        ids = (
            await common_token_ids(client, model) if files.tokenizer is None else files.tokenizer.plain_ids()
        )
        return TokenIds(tuple(ids))
    if wanted in ("auto", "tokenizer") and files.tokenizer is not None:
        candidates = candidates_of(files.tokenizer.decoded_vocabulary())
        words = await learned(candidates, files.tokenizer.count, "tokenizer")
    elif wanted in ("auto", "server") and await tokenize(client, model, "a") is not None:
        words = await learned(COMMON_WORDS, counting_by_server(client, model), "server")
    elif wanted == "server":
        raise TargetError(f"{config.server.base_url} has no /tokenize; give --tokenizer")
    if words is None and wanted in ("tokenizer", "server"):
        raise TargetError(f"--prompt-lengths={wanted}: too few words are one token; use --prompt-lengths=ids")
    return words or Words(tuple(COMMON_WORDS), tuple(f" {word}" for word in COMMON_WORDS), "words")


def _refuse_beside_requests(prompts: PromptConfig) -> None:
    given: dict[str, Callable[[], bool]] = {
        "--dataset": lambda: prompts.dataset is not None,
        "--input-length": lambda: prompts.input_length is not None,
        "--output-length": lambda: prompts.output_length is not None,
        "--num-prefixes": lambda: prompts.num_prefixes > 0,
        "--turns": lambda: prompts.turns != fixed(1),
    }
    refused = [name for name, is_given in given.items() if is_given()]
    if refused:
        raise OptionsError(f"a trace of requests brings its own lengths; leave out {', '.join(refused)}")
