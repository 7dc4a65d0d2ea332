"""Flags of the batch limits: their upper ends, for which memory is set aside, and what they are at start."""

import argparse

from headway.argument_types import integer, tokens
from headway_runtime.config import Envelope, Limits
from headway_runtime.errors import ConfigError, LimitRangeError

# Of sequences, where nothing says how many. A GPU gives three times the tokens a second with 256 that it
# gives with 32 (docs/gpu.md, Llama-3.1-8B); a CPU is at its most long before 64.
GPU_NUM_SEQS, CPU_NUM_SEQS = 256, 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `headway serve` and the in-process engine."""
    add = parser.add_argument
    add(
        "--max-num-seqs",
        type=integer(1),
        metavar="N",
        help=f"upper end of the live limit (default: {GPU_NUM_SEQS} on a GPU and {CPU_NUM_SEQS} on a CPU, or "
        "as many as the token budget has room for)",
    )
    add(
        "--max-num-batched-tokens",
        type=tokens(1),
        default=DEFAULT_MAX_NUM_BATCHED_TOKENS,
        metavar="N",
        help="upper end of the live limit",
    )
    add("--initial-max-num-seqs", type=integer(1), help="live limit at start (default: the upper end)")
    add("--initial-max-num-batched-tokens", type=integer(1), help="likewise")


def batch_limits(
    arguments: argparse.Namespace, num_seqs: int, num_speculative_tokens: int
) -> tuple[Envelope, Limits]:
    """Of one kind of device, whose default of sequences, `num_seqs`, gives way to what flags say.

    ConfigError names the flag at fault.
    """
    budget: int = arguments.initial_max_num_batched_tokens or arguments.max_num_batched_tokens
    most = arguments.max_num_seqs or max(arguments.initial_max_num_seqs or 1, min(num_seqs, budget))
    envelope = Envelope(most, arguments.max_num_batched_tokens, num_speculative_tokens)
    initial_speculative_tokens = arguments.initial_num_speculative_tokens
    limits = Limits(
        arguments.initial_max_num_seqs or most,
        budget,
        num_speculative_tokens if initial_speculative_tokens is None else initial_speculative_tokens,
    )
    try:
        envelope.check(limits)
    except LimitRangeError as error:
        prefix = "--initial-" if getattr(arguments, f"initial_{error.field}") is not None else "--"
        raise ConfigError(f"{prefix}{error.field.replace('_', '-')}: {error}") from error
    return envelope, limits
