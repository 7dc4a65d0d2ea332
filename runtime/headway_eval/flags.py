"""The command line of `headway eval`: every flag with its sentence and default; decides nothing.

An engine's own flags are MODEL's; the same with --baseline- before them are BASELINE's, and absent ones of
these say None here.
"""

import argparse

from headway.argument_types import integer, not_negative
from headway.command_parser import CommandParser
from headway_eval.tasks import MAX_TOKENS
from headway_eval.verdict import DEFAULTS, DEFAULTS_FOUR_BITS
from headway_runtime.engine_options import add_engine_arguments
from headway_runtime.sources.flags import MODEL_HELP

SAME = "same"
BUNDLED = "bundled"
NONE = "none"
BASELINE_PREFIX = "baseline_"
DEFAULT_CHUNK_TOKENS = 256
DEFAULT_WINDOW_TOKENS = 2048
DEFAULT_MAX_TOKENS = 256


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headway eval",
        description="Judge what a lever (quantization, KV type, other weights) did to a model's answers.",
        epilog="Exit status: 0 passed, 1 failed, 2 could not judge.",
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--against",
        metavar="BASELINE",
        default=SAME,
        help="what MODEL is held against; same: MODEL itself without its levers (default: %(default)s)",
    )
    _add_material(parser.add_argument_group("what both are given"))
    _add_thresholds(parser.add_argument_group("thresholds"))
    _add_report(parser.add_argument_group("report"))
    add_engine_arguments(parser.add_argument_group("MODEL's engine, as headway serve has it"))  # type: ignore[arg-type]
    _add_baseline(
        parser.add_argument_group(
            "BASELINE's engine",
            "each of the flags above with --baseline- before it, as in --baseline-kv-cache-dtype int8. "
            "Without: quantization, kv-cache-dtype, dtype and speculation at their defaults (with "
            "--against same: quantization none, kv-cache-dtype plain); the others, what MODEL has",
        )
    )
    return parser


def _add_material(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--text",
        metavar="FILE",
        help="plain text, or .jsonl with text or messages on each line; bundled: what comes with Headway for "
        "the bundled models; none (default: bundled for their tokenizer, else none)",
    )
    add(
        "--tasks",
        metavar="FILE",
        action="append",
        help=".jsonl of prompt or messages, answer and match (exact, contains, regex, json); bundled; none; "
        "may be repeated (default: bundled for the bundled models' tokenizer and chat template, else none)",
    )
    add(
        "--window-tokens",
        type=integer(2),
        help=f"of text that are attended together (default: {DEFAULT_WINDOW_TOKENS}, or the shorter context)",
    )
    add("--stride-tokens", type=integer(1), help="from a window to the next (default: half a window)")
    add(
        "--chunk-tokens",
        type=integer(1),
        default=DEFAULT_CHUNK_TOKENS,
        help="computed at once, the ones before being read from the KV cache (default: %(default)s)",
    )
    add(
        "--max-tokens",
        type=integer(1, MAX_TOKENS),
        default=DEFAULT_MAX_TOKENS,
        help="of answers to tasks that do not say it themselves (default: %(default)s)",
    )


def _add_thresholds(group: argparse._ArgumentGroup) -> None:
    usual, four_bits = DEFAULTS, DEFAULTS_FOUR_BITS
    add = group.add_argument
    add(
        "--max-kl",
        type=not_negative,
        metavar="NATS",
        help="mean KL divergence of the next-token distribution from BASELINE's (default: "
        f"{usual.max_kl:g}; {four_bits.max_kl:g} for weights of 4 bits)",
    )
    add(
        "--max-perplexity-increase",
        type=not_negative,
        metavar="SHARE",
        help=f"relative: 0.02 is two percent (default: {usual.max_perplexity_increase:g}; "
        f"{four_bits.max_perplexity_increase:g} for weights of 4 bits)",
    )
    add(
        "--max-accuracy-drop",
        type=not_negative,
        metavar="POINTS",
        help="percentage points, of each file of tasks; a drop that may be chance does not count "
        f"(default: {usual.max_accuracy_drop:g})",
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", metavar="OUT", help="write all numbers to this file, too")
    add(
        "--verdict-file",
        metavar="OUT",
        help="write verdict and numbers as one line of JSON of at most 4,096 bytes, as a container's "
        "/dev/termination-log takes",
    )
    add("--lifeline-fd", type=integer(0), metavar="FD", help="end at once when this pipe reaches its end")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="warning")


def _add_baseline(group: argparse._ArgumentGroup) -> None:
    """The engine's flags once more, each under its other name."""
    template = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(template)
    # The only list of a parser's flags that argparse keeps.
    for action in template._actions:
        name = action.option_strings[0].replace("--", "--baseline-", 1)
        dest = BASELINE_PREFIX + action.dest
        if isinstance(action, argparse.BooleanOptionalAction):
            group.add_argument(
                name,
                dest=dest,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=argparse.SUPPRESS,
            )
            continue
        group.add_argument(
            name,
            dest=dest,
            default=None,
            help=argparse.SUPPRESS,
            type=action.type or str,
            choices=action.choices,
        )
