"""`headway fetch MODEL`: fetch a remote model into the cache and print its folder.

For machines that are to serve it later without waiting, or without a network. Prints nothing else on standard
output, so that a script can use it. Nothing of the engine is imported.
"""

import argparse
import logging
import sys
from pathlib import Path

from headway.argument_types import positive
from headway.command_parser import CommandParser
from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.sources import resolve, resolve_adapter
from headway_runtime.sources.fetch_result import ProgressLines, write_error, write_fetched
from headway_runtime.sources.flags import MODEL_HELP, add_source_arguments
from headway_runtime.sources.interrupts import InterruptedBySignal, raising_on_sigterm


def main(argv: list[str]) -> int:
    """Fetch what the arguments after `headway fetch` name; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments = parser().parse_args(argv)
        _check(arguments)
    except HeadwayRuntimeError as error:
        return _refused(error)
    try:
        with raising_on_sigterm():
            folder = _fetched(arguments)
            if arguments.result_file is not None:
                write_fetched(arguments.result_file, folder)
    except HeadwayRuntimeError as error:
        if arguments.result_file is not None:
            write_error(arguments.result_file, error)
        return _refused(error)
    except InterruptedBySignal as interrupt:
        print(f"headway fetch: {interrupt}", file=sys.stderr)
        return interrupt.exit_status
    print(folder)
    return 0


def _fetched(arguments: argparse.Namespace) -> Path:
    seconds = arguments.progress_seconds
    told = ProgressLines(seconds).told if seconds else _say_nothing
    if arguments.adapter:
        return resolve_adapter(arguments.model, download_dir=arguments.download_dir, on_progress=told)
    return resolve(
        arguments.model,
        revision=arguments.revision,
        download_dir=arguments.download_dir,
        on_progress=told,
    )


def _say_nothing(there: int, wanted: int) -> None:
    """Without --progress-seconds."""


def _check(arguments: argparse.Namespace) -> None:
    """What the flags say together."""
    if arguments.adapter and arguments.revision is not None:
        raise ConfigError(
            f"--revision={arguments.revision!r} is for models; write the adapter as hf://ORG/NAME@REVISION"
        )
    if arguments.result_file is not None and not arguments.result_file.parent.is_dir():
        raise ConfigError(f"--result-file={str(arguments.result_file)!r}: its folder is not there; make it")


def _refused(error: HeadwayRuntimeError) -> int:
    print(f"headway fetch: {error}", file=sys.stderr)
    return error.exit_status


def parser() -> argparse.ArgumentParser:
    """Of the arguments after `headway fetch`."""
    made = CommandParser(
        prog="headway fetch",
        description="Fetch a model into the cache, and print its folder; that of a local one as it is.",
        raises=ConfigError,
    )
    made.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_source_arguments(made)
    made.add_argument("--adapter", action="store_true", help="MODEL is a LoRA adapter, as PEFT saves it")
    made.add_argument(
        "--result-file",
        type=Path,
        metavar="FILE",
        help="write there as JSON how it ended: folder, identity, bytes and files, or error and message",
    )
    made.add_argument(
        "--progress-seconds",
        type=positive,
        metavar="SECONDS",
        help="while fetching, write the bytes that are there and those wanted to standard error this often, "
        "as a line of JSON",
    )
    return made
