"""The command line of `headway simulate`: every flag with its sentence, default and unit; decides nothing."""

import argparse
import math
from pathlib import Path
from typing import Any, get_args

from headway.argument_types import integer, not_negative, number, positive, share_or_none
from headway.command_parser import CommandParser
from headway_runtime.speculative_options import MOST_SPECULATIVE_TOKENS
from headway_simulator.baselines import BASELINES
from headway_simulator.cluster import Conditions
from headway_simulator.gateway import RoutingRule
from headway_simulator.generators import KINDS, LEAST_PERIOD_SECONDS, Course
from headway_simulator.rates import LEAST_VARIATION, MOST_VARIATION
from headway_simulator.step_model import DEFAULT_PROFILE, PROFILES
from headway_simulator.trace import Half

DEFAULT_SLO_FACTOR = 3.0
DEFAULT_PERCENTILE = 95
LOWEST_PERCENTILE, HIGHEST_PERCENTILE = 50, 99
DEFAULT_MAX_REPLICAS = 64
DEFAULT_ACCEPTANCE = 0.6
DEFAULT_REQUESTS_PER_SECOND, DEFAULT_DURATION_SECONDS = 5.0, 3600.0
SHIPPED = "headway"
# As a manifest's fields have them.
LONGEST_TTFT_MILLISECONDS, LONGEST_TPOT_MILLISECONDS = 600_000, 60_000
MOST_REPLICAS = 1000
# Each holds a copy of the load.
MOST_JOBS = 64
# What lies outside is a slip, and some of it would run for ever.
MOST_FACTOR = 1000
up_to_thousandfold = number(lambda value: 1 <= value <= MOST_FACTOR, f"a number from 1 to {MOST_FACTOR}")
regularity = number(
    lambda value: LEAST_VARIATION <= value <= MOST_VARIATION,
    f"a number from {LEAST_VARIATION:g} to {MOST_VARIATION:g}",
)
wrongness = number(lambda value: 0.01 <= value <= 100, "a number from 0.01 to 100")
# Where parsed flags keep what `--slo` has given.
PROMISED = "promised"
CONDITIONS = Conditions()
_COURSE = Course("poisson", DEFAULT_REQUESTS_PER_SECOND, DEFAULT_DURATION_SECONDS)


def path(text: str) -> Path:
    """Of a file; an empty one is the current folder to pathlib."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no file; name one")
    return Path(text)


class PartOfPromise(argparse.Action):
    """A flag whose value `--slo` may have given already."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Sets it, or is the parser's error."""
        if self.dest in getattr(namespace, PROMISED, ()):
            raise argparse.ArgumentError(self, "--slo gives it already; leave out one of them")
        setattr(namespace, self.dest, values)


class Promise(argparse.Action):
    """A whole promise in one flag: what it names is as if the flags of these names had been given."""

    PARTS = {  # noqa: RUF012 - never changed
        "ttft": ("ttft_milliseconds", integer(1, LONGEST_TTFT_MILLISECONDS)),
        "tpot": ("tpot_milliseconds", integer(1, LONGEST_TPOT_MILLISECONDS)),
        "percentile": ("percentile", integer(LOWEST_PERCENTILE, HIGHEST_PERCENTILE)),
    }

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Sets them; a part that is misspelt, there twice or out of range is the parser's error."""
        try:
            for name, value in self._read(values).items():
                if getattr(namespace, name, None) is not None:
                    raise argparse.ArgumentTypeError(
                        f"--{name.replace('_', '-')} is given already; leave out one of them"
                    )
                setattr(namespace, name, value)
                setattr(namespace, PROMISED, (*getattr(namespace, PROMISED, ()), name))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error

    def _read(self, text: str) -> dict[str, float]:
        if "=" not in text:
            return {"slo_factor": up_to_thousandfold(text)}
        found: dict[str, float] = {}
        for part in text.split(","):
            short, _, value = part.partition("=")
            if short.strip() not in self.PARTS:
                raise argparse.ArgumentTypeError(
                    f"{part!r} is no part of a promise; write ttft=500,tpot=50,percentile=99"
                )
            name, kind = self.PARTS[short.strip()]
            if name in found:
                raise argparse.ArgumentTypeError(f"{part!r} comes a second time; leave it out")
            try:
                found[name] = kind(value.strip().removesuffix("ms"))
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{part.strip()!r}: {error}") from error
        return found


def build_parser() -> CommandParser:
    """The parser."""
    parser = CommandParser(
        prog="headway simulate",
        description="Run the controller and the engine's scheduler through a load, without a GPU, and set "
        "its cost against that of knowing everything in advance.",
    )
    add_load(parser.add_argument_group("load"))
    add_service(parser.add_argument_group("service"))
    _add_replica(parser.add_argument_group("replicas"))
    add_conditions(parser.add_argument_group("conditions"))
    _add_output(parser.add_argument_group("output"))
    return parser


def add_load(group: argparse._ArgumentGroup) -> None:
    """Which requests come."""
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        type=path,
        metavar="FILE",
        help="JSON lines of our own (docs/simulate.md), of Mooncake or of Qwen-Bailian, an Azure CSV, or a "
        "CSV of rates",
    )
    source.add_argument("--generate", choices=KINDS, help="a made-up load")
    group.add_argument(
        "--rate",
        type=positive,
        metavar="PER_SECOND",
        help="of --generate (default: 5): the mean of poisson, gamma and whole waves of diurnal, what comes "
        "before the jump of step and flash; of a CSV of rates: scale what is taken of it to this mean",
    )
    group.add_argument("--duration-seconds", type=positive, help="of --generate (default: 3600)")
    group.add_argument(
        "--factor",
        type=up_to_thousandfold,
        help=f"jump of step and flash, peak over trough of diurnal (default: {_COURSE.factor:g})",
    )
    group.add_argument(
        "--variation",
        type=regularity,
        help="standard deviation of the gaps over their mean, of gamma "
        f"(default: {_COURSE.variation:g}), or instead of what a CSV of rates says",
    )
    group.add_argument(
        "--period-seconds",
        type=positive,
        help=f"of diurnal, {LEAST_PERIOD_SECONDS:g} at least (default: a day, or the duration if shorter)",
    )
    group.add_argument(
        "--lengths",
        type=path,
        metavar="FILE",
        help="a trace of requests to draw lengths from, for --generate and CSVs of rates",
    )
    group.add_argument("--start-seconds", type=not_negative, default=0.0, help="leave out what comes before")
    group.add_argument("--end-seconds", type=positive, default=math.inf, help="leave out what comes after")
    group.add_argument("--half", choices=get_args(Half), default="all", help="of the time (default: all)")
    group.add_argument(
        "--rate-scale", type=positive, default=1.0, help="so many times the requests (default: 1)"
    )
    group.add_argument("--seed", type=integer(0), default=0, help="of everything random (default: 0)")


def add_service(group: argparse._ArgumentGroup) -> None:
    """What is promised, and with how many replicas."""
    group.add_argument(
        "--service",
        "-f",
        type=path,
        metavar="FILE",
        help="an InferenceService, before which the flags below go; default: one made of them",
    )
    group.add_argument(
        "--slo",
        action=Promise,
        metavar="PROMISE",
        help="ttft=500,tpot=50,percentile=99 (in ms; each may be left out), or a number: as --slo-factor",
    )
    group.add_argument(
        "--ttft-milliseconds",
        action=PartOfPromise,
        type=integer(1, LONGEST_TTFT_MILLISECONDS),
        help="target; default: --slo-factor times the idle TTFT of the P99 prompt",
    )
    group.add_argument(
        "--tpot-milliseconds",
        action=PartOfPromise,
        type=integer(1, LONGEST_TPOT_MILLISECONDS),
        help="target; default: --slo-factor times the idle TPOT",
    )
    group.add_argument(
        "--slo-factor",
        action=PartOfPromise,
        type=up_to_thousandfold,
        help=f"targets as multiples of idle latencies (default: {DEFAULT_SLO_FACTOR:g}, or a manifest's own)",
    )
    group.add_argument(
        "--percentile",
        action=PartOfPromise,
        type=integer(LOWEST_PERCENTILE, HIGHEST_PERCENTILE),
        help=f"objective, {LOWEST_PERCENTILE} to {HIGHEST_PERCENTILE} (default: {DEFAULT_PERCENTILE})",
    )
    group.add_argument("--min-replicas", type=integer(0, MOST_REPLICAS), help="default: 1")
    group.add_argument(
        "--max-replicas", type=integer(1, MOST_REPLICAS), help=f"default: {DEFAULT_MAX_REPLICAS}"
    )


def _add_replica(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--step-model",
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE",
        help=f"{', '.join(PROFILES)}, or a JSON file (default: {DEFAULT_PROFILE})",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=integer(0, MOST_SPECULATIVE_TOKENS),
        help=f"guesses per sequence, up to {MOST_SPECULATIVE_TOKENS} (default: as the manifest has it, or 0)",
    )
    group.add_argument(
        "--acceptance",
        type=share_or_none,
        help=f"probability that a guess is right (default: {DEFAULT_ACCEPTANCE:g})",
    )


def add_conditions(group: argparse._ArgumentGroup) -> None:
    """What a service meets besides its load, and who is in control."""
    group.add_argument(
        "--controller",
        choices=(SHIPPED, *BASELINES),
        default=SHIPPED,
        help="who sets replicas and limits: the one that ships, or another autoscaler's algorithm "
        f"(default: {SHIPPED})",
    )
    group.add_argument(
        "--initial-replicas",
        type=integer(1, MOST_REPLICAS),
        help="default: what the work of the first minute and a cold start needs",
    )
    for name, kind, words in (
        ("cold_start_seconds", not_negative, "from a pod's place on a node until it is ready"),
        ("cold_start_spread", share_or_none, "share by which cold starts differ from that, either way"),
        ("most_pods", integer(1), "that nodes have room for; more are unschedulable"),
        ("interval_seconds", positive, "between two passes of the controller"),
        ("scrape_delay_seconds", not_negative, "from samples to the decision"),
        ("missing_samples", share_or_none, "share of samples that do not come"),
        ("deaths_per_pod_hour", not_negative, "how often a ready pod dies"),
        ("step_time_error", wrongness, "steps and tokens are told so many times as long as they take"),
    ):
        default = getattr(CONDITIONS, name)
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{words} (default: {default:g})"
        )

    group.add_argument(
        "--routing",
        choices=get_args(RoutingRule),
        default=CONDITIONS.routing,
        help=f"how the gateway chooses a replica (default: {CONDITIONS.routing})",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=path, metavar="OUT", help="write the report there")
    group.add_argument("--plot", type=path, metavar="PATH", help="write a timeline there: .png, .svg or .pdf")
    group.add_argument("--no-oracle", dest="oracle", action="store_false", help="do not seek the least cost")
    group.add_argument(
        "--jobs",
        type=integer(1, MOST_JOBS),
        metavar="N",
        help="processes that look for the oracle; default: the processors there are",
    )
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")
