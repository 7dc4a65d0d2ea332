"""The flags and the config they become; asks nothing of the network and reads no file.

Names follow `vllm bench serve` where it has the same thing (`--request-rate`, `--burstiness`,
`--ignore-eos`).
"""

import argparse
import json
import math
import os
import shlex
from typing import Any

from headway_bench.arrivals import ArrivalKind
from headway_bench.config import BenchConfig, LoadConfig, PromptConfig, ReportConfig, ServerConfig
from headway_bench.drive import Extent
from headway_bench.errors import OptionsError
from headway_bench.flags import build_parser
from headway_bench.http_client import parse_base_url
from headway_bench.spread import Spread, fixed, parse_spread
from headway_bench.summary import OBJECTIVES
from headway_bench.traces import Replay

DEFAULT_REQUESTS = 100
_API_KEY_VARIABLE = "OPENAI_API_KEY"
_SECRET_FLAGS = ("--api-key", "--header")
_OWN_FIELDS = ("messages", "prompt", "stream", "n", "best_of")


def parse_config(arguments: list[str]) -> BenchConfig:
    """Flags to config. A wrong flag ends the process with status 2 and a message that names it."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return _to_config(options, arguments)
    except OptionsError as error:
        parser.error(str(error))


def _to_config(options: argparse.Namespace, arguments: list[str]) -> BenchConfig:
    if options.save_requests and options.json is None:
        raise OptionsError("--save-requests puts them into the report of --json; give that, too")
    prompts = _prompts(options)
    load = _load(options, prompts)
    _check_together(options, prompts)
    return BenchConfig(
        server=_server(options),
        load=load,
        prompts=prompts,
        report=ReportConfig(
            objectives=_objectives(options.slo),
            confidence=options.confidence,
            json_path=options.json,
            with_requests=options.save_requests,
            plot_path=options.plot,
            fail_on_error=options.fail_on_error,
            quiet=options.quiet,
        ),
        seed=options.seed,
        command=_without_secrets(arguments),
    )


def _server(options: argparse.Namespace) -> ServerConfig:
    headers = dict(_header(text) for text in options.header)
    key = options.api_key if options.api_key is not None else os.environ.get(_API_KEY_VARIABLE)
    if key:
        if not key.strip().isprintable():
            raise OptionsError("--api-key (or $OPENAI_API_KEY) holds a character that no header can carry")
        headers.setdefault("Authorization", f"Bearer {key.strip()}")
    return ServerConfig(
        base_url=options.base_url,
        address=parse_base_url(options.base_url),
        endpoint=options.endpoint,
        model=options.model,
        headers=headers,
        extra_body=_extra_body(options.extra_body),
        temperature=None if options.temperature < 0 else options.temperature,
        ignore_eos=options.ignore_eos,
        stream=options.stream,
        max_tokens_field=options.max_tokens_field,
        timeout_seconds=options.request_timeout_seconds,
        ready_timeout_seconds=options.ready_timeout_seconds,
    )


def _load(options: argparse.Namespace, prompts: PromptConfig) -> LoadConfig:
    rates, concurrencies = tuple(options.request_rate or ()), tuple(options.concurrency or ())
    if rates and concurrencies:
        raise OptionsError("--request-rate (open loop) and --concurrency (closed loop) exclude each other")
    if not rates and not concurrencies and prompts.trace is None:
        concurrencies = (1,)
    num_requests = options.num_requests
    if num_requests is None and options.duration_seconds is None and prompts.trace is None:
        num_requests = DEFAULT_REQUESTS
    if any(math.isinf(rate) for rate in rates):
        if num_requests is None:
            raise OptionsError(
                "--request-rate=inf sends everything at once; say how much with --num-requests"
            )
        if options.ramp_seconds or options.warmup_seconds:
            raise OptionsError("--request-rate=inf leaves no time for --ramp-seconds or --warmup-seconds")
    if options.ramp_seconds and not rates and not concurrencies:
        raise OptionsError("--ramp-seconds does not go with a trace's own arrivals")
    kind: ArrivalKind = options.arrivals or ("poisson" if options.burstiness is None else "gamma")
    if options.burstiness is not None and kind != "gamma":
        raise OptionsError(f"--burstiness shapes gamma arrivals, not --arrivals={kind}")
    if concurrencies and (options.arrivals or options.burstiness is not None):
        raise OptionsError("--arrivals and --burstiness say how an open loop sends; give its --request-rate")
    return LoadConfig(
        request_rates=rates,
        concurrencies=concurrencies,
        # A trace of rates brings its own burstiness unless the user says what process it shall be.
        arrivals="gamma" if options.arrivals is None and prompts.trace is not None and not rates else kind,
        burstiness=options.burstiness,
        ramp_seconds=options.ramp_seconds,
        extent=Extent(
            num_requests, options.duration_seconds, options.warmup_requests, options.warmup_seconds
        ),
        pause_seconds=options.sweep_pause_seconds,
    )


def _prompts(options: argparse.Namespace) -> PromptConfig:
    return PromptConfig(
        input_length=_spread("--input-length", options.input_length, 1.0),
        output_length=_spread("--output-length", options.output_length, 1.0),
        turns=_spread("--turns", options.turns, 1.0) or fixed(1),
        think_seconds=_spread("--think-seconds", options.think_seconds, 0.0) or fixed(0),
        num_prefixes=options.num_prefixes,
        prefix_length=options.prefix_length,
        dataset=options.dataset,
        trace=options.trace,
        replay=Replay(
            options.trace_start_seconds,
            options.trace_duration_seconds,
            options.trace_speed,
            options.trace_rate_scale,
            options.length_scale,
            options.max_input_length,
        ),
        length_source=options.prompt_lengths,
        tokenizer=options.tokenizer,
    )


def _check_together(options: argparse.Namespace, prompts: PromptConfig) -> None:
    if (options.num_prefixes > 0) != (options.prefix_length > 0):
        raise OptionsError("--num-prefixes and --prefix-length belong together; give both")
    if options.prompt_lengths == "ids":
        if options.endpoint == "chat":
            raise OptionsError("--prompt-lengths=ids needs --endpoint=completions: a chat takes no token ids")
        if prompts.turns != fixed(1):
            raise OptionsError("--prompt-lengths=ids does not go with --turns: answers come back as text")
        if prompts.dataset is not None:
            raise OptionsError("--prompt-lengths=ids does not go with --dataset, whose prompts are text")
    if options.think_seconds is not None and prompts.turns == fixed(1):
        raise OptionsError("--think-seconds is between the --turns of a conversation; give several")
    if options.prompt_lengths == "tokenizer" and options.tokenizer is None:
        raise OptionsError("--prompt-lengths=tokenizer needs --tokenizer")
    if prompts.dataset is not None and (options.input_length or options.num_prefixes):
        raise OptionsError("--dataset brings its own prompts; leave out --input-length and --num-prefixes")
    if prompts.trace is None:
        given = [name for name, value in _trace_flags(options).items() if value]
        if given:
            raise OptionsError(f"{', '.join(given)} say how to replay a --trace; there is none")
    if options.max_input_length is not None and prompts.trace is None and prompts.dataset is None:
        raise OptionsError("--max-input-length leaves out prompts of a --trace or --dataset; there is none")


def _trace_flags(options: argparse.Namespace) -> dict[str, bool]:
    plain = Replay()
    return {
        "--trace-start-seconds": options.trace_start_seconds != plain.start_seconds,
        "--trace-duration-seconds": options.trace_duration_seconds != plain.duration_seconds,
        "--trace-speed": options.trace_speed != plain.speed,
        "--trace-rate-scale": options.trace_rate_scale != plain.rate_scale,
        "--length-scale": options.length_scale != plain.length_scale,
    }


def _spread(flag: str, text: str | None, minimum: float) -> Spread | None:
    if text is None:
        return None
    try:
        return parse_spread(text, minimum)
    except OptionsError as error:
        raise OptionsError(f"{flag}: {error}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or any(ord(character) < 32 for character in text):
        raise OptionsError(f"--header={text!r} is not NAME:VALUE")
    return name.strip(), value.strip()


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = json.loads(text)
    except ValueError as error:
        raise OptionsError(f"--extra-body={text!r} is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise OptionsError(f"--extra-body={text!r} is no JSON object")
    own = [name for name in _OWN_FIELDS if name in body]
    if own:
        raise OptionsError(f"--extra-body sets {', '.join(own)}, which the benchmark sets itself")
    return body


def _objectives(texts: list[list[str]]) -> dict[str, float]:
    objectives = {}
    for text in (each for group in texts for each in group):
        name, _, value = text.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in OBJECTIVES or not milliseconds > 0:
            raise OptionsError(
                f"--slo={text!r} is not NAME:MILLISECONDS with a NAME of {', '.join(OBJECTIVES)}"
            )
        objectives[name] = milliseconds
    return objectives


def _without_secrets(arguments: list[str]) -> str:
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if hide_next:
            shown.append("***")
        elif flag in _SECRET_FLAGS and equals:
            shown.append(f"{flag}=***")
        else:
            shown.append(argument)
        hide_next = not hide_next and argument in _SECRET_FLAGS
    return shlex.join(["headway", "bench", *shown])
