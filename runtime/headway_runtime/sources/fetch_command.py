"""`headway fetch MODEL`: fetch a remote model into the cache and print its folder.

For machines that are to serve it later without waiting, or without a network. Prints nothing else on standard
output, so that a script can use it. Nothing of the engine is imported.
"""

import argparse
import logging
import sys
from typing import NoReturn

from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.sources import resolve
from headway_runtime.sources.flags import MODEL_HELP, add_source_arguments
from headway_runtime.sources.interrupts import InterruptedBySignal, raising_on_sigterm


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `headway fetch --help`")


def main(argv: list[str]) -> int:
    """Fetch what the arguments after `headway fetch` name; returns the exit status."""
    parser = _Parser(
        prog="headway fetch",
        description="Fetch a model into the cache, and print its folder; that of a local one as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_source_arguments(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments = parser.parse_args(argv)
        with raising_on_sigterm():
            folder = resolve(
                arguments.model, revision=arguments.revision, download_dir=arguments.download_dir
            )
    except HeadwayRuntimeError as error:
        print(f"headway fetch: {error}", file=sys.stderr)
        return error.exit_status
    except InterruptedBySignal as interrupt:
        print(f"headway fetch: {interrupt}", file=sys.stderr)
        return interrupt.exit_status
    print(folder)
    return 0
