"""The `headway` command: finds the subcommands that the installed packages contribute and runs one.

A subcommand is an entry point of the group `headway.commands`: a function that takes the arguments
after its name and returns an exit status. Only the chosen one is imported, so that `headway --help`
costs nothing and a missing extra is reported by name.
"""

import ast
import errno
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from headway import __version__
from headway.needs import missing_modules, told

GROUP = "headway.commands"
# As a shell tells of a program that SIGPIPE ended.
EXIT_STATUS_NOBODY_READS = 141
# As sysexits.h has it: a full disk behind standard output, say.
EXIT_STATUS_UNWRITABLE = 74
EXTRA_OF_PACKAGE = {
    "headway_runtime": "runtime",
    "headway_gateway": "gateway",
    "headway_bench": "bench",
    "headway_eval": "runtime",
    "headway_operator": "operator",
    "headway_simulator": "simulate",
}


def main(argv: list[str] | None = None) -> int:
    """Run `headway SUBCOMMAND ...` and return its exit status (2 for a usage error)."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(commands))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"headway {__version__}")
        return 0
    name, *rest = arguments
    if name not in commands:
        print(f"headway: unknown command {name!r}\n\n{_usage(commands)}", file=sys.stderr)
        return 2
    return _run(commands[name], rest)


def _run(entry: EntryPoint, arguments: list[str]) -> int:
    extra = EXTRA_OF_PACKAGE.get(entry.module.partition(".")[0])
    missing = [] if {"-h", "--help"} & set(arguments) else missing_modules(entry.name)
    try:
        if not missing:
            status = int(entry.load()(arguments))
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        # Whoever read has had enough, as `head` does.
        _leave_output()
        return EXIT_STATUS_NOBODY_READS
    except OSError as error:
        # Of a file it would have the name.
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        _leave_output()
        print(f"headway {entry.name}: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_STATUS_UNWRITABLE
    except ModuleNotFoundError as error:
        if error.name is None or extra is None or error.name.startswith("headway"):
            raise
        missing = [error.name.partition(".")[0]]
    print(f"headway {entry.name} {told(missing, extra or entry.name)}", file=sys.stderr)
    return 2


def _leave_output() -> None:
    """What is left in its buffer would fail at the end again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(commands: dict[str, EntryPoint]) -> str:
    lines = [f"headway {__version__}", "", "usage: headway COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<10} {_summary(entry)}" for name, entry in sorted(commands.items())]
    lines += ["", "headway COMMAND --help tells a command's options"]
    return "\n".join(lines)


def _summary(entry: EntryPoint) -> str:
    """What the first line of the module's docstring, "`headway NAME`: ...", says; it is read but not run."""
    relative = Path(*entry.module.split(".")).with_suffix(".py")
    package = find_spec(entry.module.partition(".")[0])
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder).parent / relative
        if path.is_file():
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            return docstring.partition("\n")[0].partition(": ")[2]
    return ""
