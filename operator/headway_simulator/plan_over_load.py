"""`headway plan MODEL --gpu KIND --trace FILE`: replicas and costs of a load, and which lever pays.

With `--generate KIND` instead of a FILE: of a made-up load.
With `-f FILE`: of a manifest's replicas, and of its model where no MODEL is named.

The plan's arithmetic gives each lever a step model (`levers`); the simulator runs the load through the
controller with each of them, all held to the same promise. Exit status as without a load.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tqdm import tqdm

from headway.argument_types import share_or_none
from headway_operator.slo import Target, target_of
from headway_runtime.batch_options import DEFAULT_MAX_NUM_BATCHED_TOKENS
from headway_runtime.errors import ConfigError, HeadwayRuntimeError
from headway_runtime.fit.bounds import DEFAULT_EFFICIENCY
from headway_runtime.fit.gpu_kinds import GPU_KINDS
from headway_runtime.fit.plan_command import (
    EXIT_STATUS_BAD_INPUT,
    EXIT_STATUS_FITS,
    EXIT_STATUS_TOO_LARGE,
    answer_of,
    broke_off,
    build_parser,
)
from headway_runtime.fit.report import Answer, as_json, text
from headway_simulator.cluster import Setting, Simulation
from headway_simulator.context_limit import Fitted, fitted, with_refused
from headway_simulator.engine import longest_sequence
from headway_simulator.errors import OptionsError, SimulatorError
from headway_simulator.flags import DEFAULT_ACCEPTANCE, add_conditions, add_load, add_service
from headway_simulator.levers import PLAIN, Lever, from_data_sheet, levers, with_lever
from headway_simulator.measures import Measures, measures
from headway_simulator.options import controller_of, load_of, setting_with
from headway_simulator.report import context_counts, context_lines, judged_targets, unsimulated_lines
from headway_simulator.service_flags import planned_arguments
from headway_simulator.simulated_runner import Speculation
from headway_simulator.step_model import StepModel, read_step_model
from headway_simulator.timeline import HOUR_SECONDS, Hour, by_hour
from headway_simulator.trace import Trace
from headway_simulator.unsimulated import passed_over_by_plan

logger = logging.getLogger(__name__)

INTERRUPTED_STATUS = 130
HOURS_OF_DAY = 24
# Costs that differ by less are sums of the same numbers in another order.
SAME = 1e-9
MINUTE_SECONDS = 60.0
# A load may lack so much of a day, or have so much more.
WHOLE_DAYS = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """What a lever comes to over the load. why_not: why it was not simulated, or "".

    gpu_hours_per_day, usd_per_day: of the load's mean hour, 24 times; usd is None without a price. hours: of
    the load, each with its replicas.
    """

    flags: str
    why_not: str
    step_model: StepModel | None = None
    measures: Measures | None = None
    gpu_hours_per_day: float | None = None
    usd_per_day: float | None = None
    hours: tuple[Hour, ...] = ()


def main(argv: list[str]) -> int:
    """Answer for the arguments after `headway plan`; returns the exit status."""
    try:
        arguments = _parsed(argv)
        answer = _answer(arguments)
        trace = load_of(arguments)
        fit = fitted(trace, answer.fit.question.max_model_len)
        costs = _costs(arguments, answer, fit)
    except (HeadwayRuntimeError, SimulatorError) as error:
        print(f"headway plan: {error}", file=sys.stderr)
        return EXIT_STATUS_BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except Exception as error:
        logger.exception("the plan broke off")
        return broke_off(error)
    target = target_of(costs[1].service.spec)
    passed = passed_over_by_plan(costs[1].service.spec)
    if arguments.json:
        load = {**_as_json(trace, fit, target, costs[0]), "not_simulated": passed}
        print(json.dumps({**as_json(answer), "load": load}, indent=2))
    else:
        replicas = costs[1].service.spec.replicas
        lines = [*_lines(trace, fit, target, costs[0], replicas), *unsimulated_lines(passed)]
        print("\n".join([text(answer), "", *lines]))
    return EXIT_STATUS_FITS if answer.fit.fits else EXIT_STATUS_TOO_LARGE


def _parsed(argv: list[str]) -> argparse.Namespace:
    """Flags that are given go before those of a manifest, which go before defaults."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.service is None:
        if arguments.model is None:
            raise ConfigError("MODEL: a plan is of a model; give one, or a manifest with -f FILE")
        return arguments
    model, *served = planned_arguments(arguments.service)
    return parser.parse_args([*([model] if arguments.model is None else []), *served, *argv])


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(is_model_needed=False)
    add_load(parser.add_argument_group("load"))
    add_service(parser.add_argument_group("service"))
    replica = parser.add_argument_group("replicas")
    replica.add_argument(
        "--step-model",
        metavar="NAME|FILE",
        help="as of headway simulate: a measured one (default: by the GPU's data sheet and --efficiency)",
    )
    replica.add_argument(
        "--acceptance",
        type=share_or_none,
        default=DEFAULT_ACCEPTANCE,
        help=f"probability that a guess is right, for speculation (default: {DEFAULT_ACCEPTANCE:g})",
    )
    add_conditions(parser.add_argument_group("conditions"))
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    # How the service guesses is in --speculative-config. A limit that no flag gives is the manifest's.
    parser.set_defaults(num_speculative_tokens=0, max_num_batched_tokens=None)
    return parser


def _answer(arguments: argparse.Namespace) -> Answer:
    if arguments.gpu is None:
        load = "--trace" if arguments.generate is None else "--generate"
        raise ConfigError(f"{load}: how long steps take hangs on the kind of GPU; give --gpu")
    asked = argparse.Namespace(**vars(arguments))
    # The efficiency shapes the step model, too, with or without a price.
    if arguments.price_per_gpu_hour is None:
        asked.efficiency = None
        if arguments.efficiency is not None and arguments.step_model is not None:
            raise ConfigError(
                f"--efficiency={arguments.efficiency:g} does nothing beside --step-model without "
                "--price-per-gpu-hour; leave it out, or give a price"
            )
    if arguments.efficiency is None:
        arguments.efficiency = DEFAULT_EFFICIENCY
    if asked.max_num_batched_tokens is None:
        asked.max_num_batched_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS
    return answer_of(asked)


def _costs(arguments: argparse.Namespace, answer: Answer, load: Fitted) -> tuple[list[Cost], Setting]:
    """Of the service as it is and of each lever; and the setting of the first, whose targets all have."""
    kind = GPU_KINDS[arguments.gpu]
    plain = (
        from_data_sheet(answer.fit, kind, arguments.efficiency)
        if arguments.step_model is None
        else _measured(arguments)
    )
    arguments.acceptance, acceptance = None, arguments.acceptance
    setting = setting_with(arguments, load.trace, plain)
    found = []
    own = _speculation(arguments, answer, acceptance)
    tried = list(levers(answer.fit.question, own, acceptance))
    is_silent = arguments.quiet or not sys.stderr.isatty()
    with tqdm(total=100, unit="%", disable=is_silent, bar_format="{l_bar}{bar}| {elapsed}") as bar:
        for number, lever in enumerate(tried):

            def told(share: float, before: int = number) -> None:
                bar.update(max(0.0, 100 * (before + share) / len(tried) - bar.n))

            bar.set_description(lever.flags.partition(" '")[0])
            model = plain if lever.flags == PLAIN else with_lever(plain, answer.fit, lever.fit, kind)
            found.append(_cost(arguments, load, setting, lever, model, told))
            told(1.0)
    return found, setting


def _measured(arguments: argparse.Namespace) -> StepModel:
    """The one of `--step-model`. Raises OptionsError where it is of other GPUs than the plan."""
    model = read_step_model(arguments.step_model)
    if model.gpus != arguments.num_ranks:
        raise OptionsError(
            f"--step-model={arguments.step_model!r} was measured with gpus={model.gpus} a replica, and the "
            f"plan is of --tensor-parallel-size={arguments.num_ranks}; give --tensor-parallel-size "
            f"{model.gpus}, or another step model"
        )
    if model.gpu and model.gpu not in GPU_KINDS:
        raise OptionsError(
            f"--step-model={arguments.step_model!r} has gpu={model.gpu!r}, which is no kind that a plan "
            f"knows; correct it ({', '.join(GPU_KINDS)}), or leave it out"
        )
    if model.gpu and model.gpu != arguments.gpu:
        raise OptionsError(
            f"--step-model={arguments.step_model!r} was measured with gpu={model.gpu!r}, and the plan is of "
            f"--gpu={arguments.gpu!r}; give --gpu {model.gpu}, or another step model"
        )
    return model


def _speculation(arguments: argparse.Namespace, answer: Answer, acceptance: float) -> Speculation | None:
    """As the flags have it, among which a manifest's stand; the answer has read them already."""
    number = answer.fit.question.num_speculative_tokens
    if not number:
        return None
    is_adaptive = json.loads(arguments.speculative_config).get("adaptive", True)
    return Speculation(number, acceptance, is_adaptive=is_adaptive)


def _cost(
    arguments: argparse.Namespace,
    load: Fitted,
    setting: Setting,
    lever: Lever,
    model: StepModel,
    told: Callable[[float], None],
) -> Cost:
    if not lever.fit.fits:
        return Cost(lever.flags, "does not fit the GPU")
    if longest_sequence(model) < setting.engine.max_model_len:
        room, longest = longest_sequence(model), setting.engine.max_model_len
        return Cost(lever.flags, f"a cache of {room} tokens has no room for a request of {longest}")
    trace = load.trace
    # Another replica begins with other numbers; the promise stays that of the service as it is.
    other = setting_with(arguments, trace, model)
    engine = replace(other.engine, speculation=lever.speculation)
    changed = replace(other, service=setting.service, engine=engine)
    run = Simulation(trace, changed, controller_of(arguments, trace, changed), told).result()
    run = with_refused(run, load.refused)
    target = target_of(setting.service.spec)
    found = measures(run, target, model.gpus)
    per_day = found.gpu_hours / (trace.duration_seconds / 3600) * HOURS_OF_DAY
    price = arguments.price_per_gpu_hour
    usd = None if price is None else per_day * price
    return Cost(lever.flags, "", model, found, per_day, usd, tuple(by_hour(run, target)))


def best_of(costs: Sequence[Cost], target: Target) -> list[Cost]:
    """The cheapest that attain the objective, several where they cost the same; none where none does."""
    able = [
        one
        for one in costs
        if one.measures is not None and one.measures.joint_attainment * 100 >= target.percentile
    ]
    least = min((one.gpu_hours_per_day or 0.0 for one in able), default=0.0)
    return [one for one in able if math.isclose(one.gpu_hours_per_day or 0.0, least, rel_tol=SAME)]


def _as_json(trace: Trace, fit: Fitted, target: Target, costs: Sequence[Cost]) -> dict[str, Any]:
    best = best_of(costs, target)
    return {
        "trace": trace.name,
        "duration_seconds": trace.duration_seconds,
        "requests_per_second": trace.requests_per_second,
        **context_counts(fit),
        "objective": target.percentile / 100,
        "targets": judged_targets(target),
        "levers": [asdict(one) for one in costs],
        "cheapest": best[0].flags if best else None,
        "as_cheap": [one.flags for one in best[1:]],
    }


def _lines(
    trace: Trace, fit: Fitted, target: Target, costs: Sequence[Cost], fixed_replicas: int | None
) -> list[str]:
    targets = target.targets
    promised = ", ".join(
        f"{name} {value:g} ms"
        for name, value in (("TTFT", targets.ttft_milliseconds), ("TPOT", targets.tpot_milliseconds))
        if value is not None
    )
    promise = f"P{target.percentile} {promised}" if promised else "nothing promised"
    width = max(len(one.flags) for one in costs)
    load = f"{trace.name}: {len(trace.arrivals)} requests in {_span(trace.duration_seconds)}"
    lines = [
        f"over {load}, {promise}; simulated, not measured",
        *(f"  {told}" for told in context_lines(fit, target)),
        *(f"  {told}" for told in _hours_told(trace, costs[0])),
        f"  {'lever':{width}}  attained  replicas, most  GPU-hours a day  USD a day  against as it is",
    ]
    plain = costs[0].gpu_hours_per_day
    lines += [_line(one, plain, width) for one in costs]
    best = best_of(costs, target)
    if fixed_replicas is not None:
        lines.append(
            f"spec.replicas={fixed_replicas} stays with every lever, which then saves no replica; leave it "
            "out to see how many would do"
        )
    if not best:
        lines.append("none of these attains the objective")
    elif fixed_replicas is not None:
        lines.append(f"attain the objective: {', '.join(one.flags for one in best)}")
    elif PLAIN in (one.flags for one in best):
        lines.append("no lever pays: as it is, it attains the objective for the least")
    else:
        lines.append(f"what pays most: {', or as much: '.join(one.flags for one in best)}")
    return lines


def _span(seconds: float) -> str:
    if seconds < 2 * MINUTE_SECONDS:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_SECONDS:
        return f"{seconds / MINUTE_SECONDS:.0f} minutes"
    return f"{seconds / HOUR_SECONDS:.1f} hours"


def _hours_told(trace: Trace, plain: Cost) -> list[str]:
    """Of what a day is made, and its busiest hour."""
    lines = []
    days = trace.duration_seconds / (HOURS_OF_DAY * HOUR_SECONDS)
    if round(days) < 1 or abs(days - round(days)) > WHOLE_DAYS:
        lines.append("a day is taken to be this load's mean hour, 24 times: it is of no whole days")
    if len(plain.hours) > 1:
        most = max(plain.hours, key=lambda one: one.replicas)
        lines.append(
            f"as it is, most replicas in hour {plain.hours.index(most) + 1} of {len(plain.hours)}: "
            f"{most.replicas:.1f} on average, for {most.requests_per_second:.2f} requests/s"
        )
    return lines


def _line(one: Cost, plain: float | None, width: int) -> str:
    if one.measures is None or one.gpu_hours_per_day is None:
        return f"  {one.flags:{width}}  {one.why_not}"
    found = one.measures
    usd = "-" if one.usd_per_day is None else f"{one.usd_per_day:,.0f}"
    against = "-" if not plain else f"{one.gpu_hours_per_day / plain - 1:+.0%}"
    replicas = f"{found.mean_replicas:.1f}, {found.most_replicas}"
    return (
        f"  {one.flags:{width}}  {found.joint_attainment:8.2%}  {replicas:>14}  {one.gpu_hours_per_day:15.1f}"
        f"  {usd:>9}  {against:>16}"
    )
