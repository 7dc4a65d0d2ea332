"""How every command reads its flags: what is wrong is said in one line, with the remedy.

argparse by itself prints the whole usage first, says "unrecognized arguments" of a misspelt flag, and takes
abbreviations, which the next release may make ambiguous.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

SIMILARITY = 0.7


class CommandParser(argparse.ArgumentParser):
    """A command's parser.

    raises: what a wrong argument raises; without, it ends the process with status 2, as argparse does.
    other_names: a flag that another tool has for the same thing -> the flag here.
    """

    def __init__(
        self,
        *,
        raises: type[Exception] | None = None,
        other_names: Mapping[str, str] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(**{"allow_abbrev": False, **how})
        self._raises, self._other_names = raises, other_names or {}

    def error(self, message: str) -> NoReturn:
        """One line that names the flag, the value and where the flags are told."""
        told = f"{message}; see `{self.prog} --help`"
        if self._raises is not None:
            raise self._raises(told)
        self.exit(2, f"{self.prog}: {told}\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As of argparse, but misspelt flags are told first: what is missing may be what they were to be."""
        given = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(given)
        return super().parse_known_args(given, namespace)

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        told = []
        if {"-h", "--help"} & set(arguments):
            return
        for argument in arguments:
            if argument == "--":
                break
            flag = argument.partition("=")[0]
            # With a blank in it argparse takes it for a value.
            if not flag.startswith("--") or " " in argument or flag in self._option_string_actions:
                continue
            told.append(f"{flag}{self._hint(flag)}")
        if told:
            self.error(f"unknown flag{'s' if len(told) > 1 else ''} {', '.join(told)}")

    def _hint(self, flag: str) -> str:
        if flag in self._other_names:
            return f" (here {self._other_names[flag]})"
        known = self._option_string_actions
        near = [name for name in known if name.startswith(flag)]
        if len(near) != 1:
            near = get_close_matches(flag, known, 1, SIMILARITY)
        return f" (did you mean {near[0]}?)" if near else ""
