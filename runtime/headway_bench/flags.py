"""The command line of `headway bench`: every flag with its sentence, default and unit; decides nothing."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from headway.argument_types import any_number, integer, not_negative, number, positive
from headway.command_parser import CommandParser

_SPREADS = (
    "N, uniform:LOW:HIGH, normal:MEAN:STD[:LOW:HIGH], lognormal:MEAN:STD[:LOW:HIGH] or exponential:MEAN"
)
_RATE = number(lambda value: value > 0, "a number above 0, or inf", takes_infinity=True)
_CONFIDENCE = number(lambda value: 0.5 <= value < 1, "0.5 or more and less than 1")
# Flags of `vllm bench serve` that have another name here; docs/bench.md shows them, too.
VLLM_NAMES: Mapping[str, str] = {
    "--backend": "--endpoint",
    "--dataset-path": "--dataset",
    "--disable-tqdm": "--quiet",
    "--goodput": "--slo",
    "--host": "--base-url",
    "--max-concurrency": "--concurrency",
    "--num-prompts": "--num-requests",
    "--num-warmups": "--warmup-requests",
    "--port": "--base-url",
    "--random-input-len": "--input-length",
    "--random-output-len": "--output-length",
    "--random-prefix-len": "--prefix-length",
    "--ready-check-timeout-sec": "--ready-timeout-seconds",
    "--result-filename": "--json",
    "--save-detailed": "--save-requests",
}


def build_parser() -> CommandParser:
    """The parser."""
    parser = CommandParser(
        prog="headway bench",
        description="Send a load to an OpenAI-compatible server and report what its clients see.",
        epilog="Several values of --request-rate or --concurrency make a sweep: one run for each.",
        other_names=VLLM_NAMES,
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_trace(parser.add_argument_group("traces and data sets"))
    _add_report(parser.add_argument_group("report"))
    return parser


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="default: chat")
    group.add_argument("--api-key", help="default: $OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="may be repeated")
    group.add_argument("--extra-body", metavar="JSON", help="an object whose fields every request gets")
    group.add_argument(
        "--temperature",
        type=any_number,
        default=0.0,
        help="default: 0 (greedy); below 0: the field is not sent",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="send ignore_eos, which vLLM and Headway know, so that answers are as long as asked",
    )
    group.add_argument(
        "--no-stream",
        dest="stream",
        action="store_false",
        help="ask for whole answers: the first token is then seen with the last one",
    )
    group.add_argument(
        "--max-tokens-field", choices=["max_tokens", "max_completion_tokens"], default="max_tokens"
    )
    group.add_argument(
        "--request-timeout-seconds", type=positive, default=600.0, help="of one request (default: 600)"
    )
    group.add_argument(
        "--ready-timeout-seconds",
        type=not_negative,
        default=600.0,
        help="wait so long for the server to answer and its model to be ready; 0: do not (default: 600)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate", type=_RATE, nargs="+", metavar="PER_SECOND", help="open loop; inf: all at once"
    )
    group.add_argument(
        "--concurrency", type=integer(1), nargs="+", metavar="USERS", help="closed loop (default: 1)"
    )
    group.add_argument(
        "--arrivals", choices=["poisson", "gamma", "constant"], help="of an open loop (default: poisson)"
    )
    group.add_argument(
        "--burstiness", type=positive, help="shape of gamma arrivals: 1 is Poisson, below 1 comes in bursts"
    )
    group.add_argument(
        "--ramp-seconds",
        type=not_negative,
        default=0.0,
        help="reach the rate or the users in a straight line",
    )
    group.add_argument(
        "--num-requests", type=integer(1), help="default: 100 without --duration-seconds or --trace"
    )
    group.add_argument("--duration-seconds", type=positive, help="send for so long; answers are awaited")
    group.add_argument(
        "--warmup-requests", type=integer(0), default=0, help="sent first and on top, left out of the report"
    )
    group.add_argument(
        "--warmup-seconds", type=not_negative, default=0.0, help="likewise: what is due in this first time"
    )
    group.add_argument(
        "--sweep-pause-seconds", type=not_negative, default=1.0, help="between two runs (default: 1)"
    )
    group.add_argument(
        "--seed", type=integer(0), default=0, help="same seed, same prompts and arrivals (default: 0)"
    )


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-length", metavar="TOKENS", help=f"{_SPREADS} (default: 128)")
    group.add_argument("--output-length", metavar="TOKENS", help="likewise (default: 64)")
    group.add_argument(
        "--num-prefixes",
        type=integer(0),
        default=0,
        help="distinct beginnings that prompts share (default: 0)",
    )
    group.add_argument(
        "--prefix-length", type=integer(0), default=0, metavar="TOKENS", help="of each, before --input-length"
    )
    group.add_argument("--turns", metavar="N", help="requests in one conversation, likewise (default: 1)")
    group.add_argument(
        "--think-seconds", metavar="SECONDS", help="from an answer to the next turn, likewise (default: 0)"
    )
    group.add_argument(
        "--prompt-lengths",
        choices=["auto", "tokenizer", "server", "ids", "words"],
        default="auto",
        help="what makes lengths exact: --tokenizer, the server's /tokenize, token ids (completions), or "
        "words, which are approximate; auto takes the first of tokenizer, server, words that is there",
    )
    group.add_argument("--tokenizer", type=Path, help="a tokenizer.json or the folder that holds it")


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset", type=Path, help="JSON or JSON lines in ShareGPT's shape")
    group.add_argument(
        "--trace",
        type=Path,
        help="Azure CSV, Mooncake JSON lines, or a CSV of start_seconds,requests_per_second; with "
        "--request-rate or --concurrency only its lengths are used",
    )
    group.add_argument("--trace-start-seconds", type=not_negative, default=0.0, help="begin of the slice")
    group.add_argument(
        "--trace-duration-seconds",
        type=positive,
        default=math.inf,
        help="length of the slice, in trace time",
    )
    group.add_argument("--trace-speed", type=positive, default=1.0, help="2 replays in half the time")
    group.add_argument(
        "--trace-rate-scale",
        type=positive,
        default=1.0,
        help="keep this share of the requests, or multiply rates (default: 1)",
    )
    group.add_argument("--length-scale", type=positive, default=1.0, help="multiply a trace's lengths")
    group.add_argument(
        "--max-input-length", type=integer(1), metavar="TOKENS", help="leave out longer prompts"
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME:MILLISECONDS",
        help="an objective for each request: ttft, tpot or e2e; may be repeated",
    )
    group.add_argument("--confidence", type=_CONFIDENCE, default=0.95, help="of intervals (default: 0.95)")
    group.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    group.add_argument("--save-requests", action="store_true", help="with every single request in it")
    group.add_argument("--plot", type=Path, metavar="PATH", help="write curves there: .png, .svg or .pdf")
    group.add_argument("--fail-on-error", action="store_true", help="exit with 1 when a request failed")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")
