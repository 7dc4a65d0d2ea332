"""`python -m e2e.cluster COMMAND`: build, start, use and remove the test cluster."""

import argparse
import shlex
import sys
import time

from e2e.cluster.binaries import GROUPS, build
from e2e.cluster.lifecycle import down, up
from e2e.cluster.machine import MachineError
from e2e.cluster.processes import inside
from e2e.cluster.session import execute, run
from e2e.cluster.settings import Settings, read_settings

GROUP_NAMES = ", ".join(GROUPS)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    settings = read_settings()
    try:
        if arguments.command == "build":
            if unknown := set(arguments.group) - GROUPS.keys():
                parser.error(f"unknown group {', '.join(sorted(unknown))!r}; there are {GROUP_NAMES}")
            for name, path in build(arguments.group, settings.cache).items():
                print(f"{name}\t{path}")
        elif arguments.command == "up":
            _up(settings)
        elif arguments.command == "down":
            down(settings)
        elif arguments.command == "exec":
            return execute(settings, arguments.argument)
        else:
            return run(settings, arguments.argument)
    except (MachineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="compile the programs into the cache and print their paths")
    builder.add_argument("group", nargs="*", default=list(GROUPS), help=f"of {GROUP_NAMES}; all unless told")
    commands.add_parser("up", help="start a fresh cluster and print how to reach it")
    commands.add_parser("down", help="stop the cluster and remove everything it left")
    for name, text in (
        ("exec", "run a command with the cluster that `up` started"),
        ("run", "run a command with a fresh cluster that is gone afterwards"),
    ):
        commands.add_parser(name, help=text).add_argument("argument", nargs="+", help="the command, after --")
    return parser


def _up(settings: Settings) -> None:
    started = time.monotonic()
    programs = up(settings)
    print(f"node Ready after {time.monotonic() - started:.1f} s; state and logs in {settings.work}")
    kubectl = [*inside(settings), str(programs["kubectl"]), f"--kubeconfig={settings.kubeconfig}"]
    print(f"kubectl: {shlex.join(kubectl)}")
    print(f"clients reach pods and Services with the prefix: {shlex.join(inside(settings))}")


raise SystemExit(main())
