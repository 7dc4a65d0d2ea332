"""From flags to a load, a service and its conditions; the one place that knows what defaults mean."""

import argparse
from dataclasses import replace
from typing import Any

from headway_operator.slo import target_of
from headway_operator.spec.speculative import Speculative
from headway_runtime.config import Limits
from headway_simulator.baselines import BASELINES, Known
from headway_simulator.cluster import Conditions, Setting
from headway_simulator.control import Controller, headway
from headway_simulator.engine import EngineSettings, longest_sequence
from headway_simulator.errors import OptionsError
from headway_simulator.flags import (
    CONDITIONS,
    DEFAULT_ACCEPTANCE,
    DEFAULT_DURATION_SECONDS,
    DEFAULT_REQUESTS_PER_SECOND,
    SHIPPED,
)
from headway_simulator.generators import DAY_SECONDS, Course, Kind, generated
from headway_simulator.oracle import INTERVAL_SECONDS
from headway_simulator.rates import (
    FEW_REQUESTS,
    MOST_REQUESTS,
    Lengths,
    arrivals_of,
    check_number,
    mean_rate,
    scaled_to_mean,
    within,
)
from headway_simulator.service_flags import service_of
from headway_simulator.simulated_runner import Speculation
from headway_simulator.step_model import (
    StepModel,
    read_step_model,
    slower,
)
from headway_simulator.trace import Trace, half_of, part_of, scaled_rate
from headway_simulator.trace_files import read_trace
from headway_simulator.work import guessed_replicas, mean_replicas, peak_replicas

# Which flags only mean something for made-up loads, and for CSVs of rates.
GENERATOR_FLAGS = ("duration_seconds", "factor", "period_seconds")
KINDS_WITH: dict[str, tuple[Kind, ...]] = {
    "factor": ("diurnal", "step", "flash"),
    "variation": ("gamma",),
    "period_seconds": ("diurnal",),
}
# A simulation ends some day: these are two weeks of passes a tenth of a second apart.
LEAST_SECONDS, MOST_PASSES = 0.001, 12_096_000
# Of a shorter load no replica is kept busy for long.
LEAST_WORK_SECONDS = 10.0
RATE_FLAGS = ("rate", "variation", "lengths")


def load_of(options: argparse.Namespace) -> Trace:
    """The requests that come. Raises OptionsError and TraceError."""
    trace = _generated(options) if options.generate else _read(options)
    _check_part(options, trace.duration_seconds)
    trace = half_of(part_of(trace, options.start_seconds, options.end_seconds), options.half)
    if trace.duration_seconds < LEAST_SECONDS:
        raise OptionsError(
            f"the load lasts {trace.duration_seconds:g} s, less than {LEAST_SECONDS:g}; take more of it"
        )
    num_passes = trace.duration_seconds / options.interval_seconds
    if num_passes > MOST_PASSES:
        raise OptionsError(
            f"the load lasts {trace.duration_seconds:g} s, {num_passes:.3g} passes of the controller, more "
            f"than {MOST_PASSES:,}; take a part of it by --end-seconds, or raise "
            f"--interval-seconds={options.interval_seconds:g}"
        )
    for name in ("interval_seconds", "scrape_delay_seconds"):
        value, default = getattr(options, name), getattr(CONDITIONS, name)
        if value > default and value >= trace.duration_seconds:
            raise OptionsError(
                f"--{name.replace('_', '-')}={value:g}: nothing is decided within the load's "
                f"{trace.duration_seconds:g} s; lower it"
            )
    check_number("the load", len(trace.arrivals))
    if options.rate_scale != 1:
        check_number(f"--rate-scale={options.rate_scale:g}", options.rate_scale * len(trace.arrivals))
        trace = scaled_rate(trace, options.rate_scale, options.seed)
    if not trace.arrivals:
        scaled = f", or raise --rate-scale={options.rate_scale:g}" if options.rate_scale < 1 else ""
        raise OptionsError(
            "no request is left of the load; widen the part of it that is taken (--start-seconds, "
            f"--end-seconds, --half){scaled}"
        )
    return trace


def _check_part(options: argparse.Namespace, duration_seconds: float) -> None:
    start, end = options.start_seconds, min(options.end_seconds, duration_seconds)
    if not start < end:
        told = "the load's end at" if end == duration_seconds else "--end-seconds"
        raise OptionsError(f"--start-seconds={start:g} is not before {told} {end:g}; lower it")


def _generated(options: argparse.Namespace) -> Trace:
    for name, kinds in KINDS_WITH.items():
        if options.generate not in kinds:
            _refuse(options, (name,), f"is of --generate {' and '.join(kinds)}; leave it out")
    changes = {
        name: getattr(options, name) for name in ("factor", "variation") if getattr(options, name) is not None
    }
    seconds = options.duration_seconds or DEFAULT_DURATION_SECONDS
    course = Course(
        options.generate,
        options.rate or DEFAULT_REQUESTS_PER_SECOND,
        seconds,
        # Of a wave that is longer than the load only the night would be there.
        period_seconds=options.period_seconds or min(DAY_SECONDS, seconds),
        **changes,
    )
    return generated(course, _lengths(options), options.seed)


def _read(options: argparse.Namespace) -> Trace:
    _refuse(options, GENERATOR_FLAGS, "is of --generate; leave it out")
    found = read_trace(options.trace)
    if isinstance(found, Trace):
        _refuse(
            options,
            RATE_FLAGS,
            "is of --generate and of CSVs of rates, and this trace has its requests; leave it out "
            "(--rate-scale takes so many times as many of them)",
        )
        return found
    seconds = found[-1].end_seconds
    _check_part(options, seconds)
    # No requests are made of what is then left out: two weeks may have more than can be held.
    windows, name = (
        within(found, options.start_seconds, min(options.end_seconds, seconds)),
        options.trace.name,
    )
    part = _part(options, seconds)
    if (rate := options.rate) is None and (mean := mean_rate(windows, *part)) is not None:
        length = part[1] - part[0]
        if options.rate_scale == 1 and mean * length > MOST_REQUESTS:
            rate = FEW_REQUESTS / length
            name += f" (at {rate:.3g} requests/s for {mean:.3g}, which are too many; --rate asks for others)"
    if rate is not None:
        windows = scaled_to_mean(windows, rate, *part)
    return arrivals_of(name, windows, _lengths(options), options.seed, variation=options.variation)


def _part(options: argparse.Namespace, duration_seconds: float) -> tuple[float, float]:
    """From when to when a load is taken."""
    start, end = options.start_seconds, min(options.end_seconds, duration_seconds)
    middle = (start + end) / 2
    return (middle if options.half == "verdict" else start), (middle if options.half == "tuning" else end)


def _lengths(options: argparse.Namespace) -> Lengths:
    if options.lengths is None:
        return Lengths(None)
    found = read_trace(options.lengths)
    if not isinstance(found, Trace):
        raise OptionsError(f"--lengths={str(options.lengths)!r} holds rates; give a trace of requests")
    return Lengths(found)


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise OptionsError(f"--{name.replace('_', '-')}={getattr(options, name)!s} {why}")


def setting_of(options: argparse.Namespace, trace: Trace) -> Setting:
    """The service and what it meets. Raises OptionsError."""
    model, longest = read_step_model(options.step_model), longest_of(trace)
    if longest > longest_sequence(model):
        raise OptionsError(
            f"the longest request has {longest} tokens, and the KV cache of step model {model.name!r} holds "
            f"{longest_sequence(model)} in whole blocks; leave the request out, or give a larger "
            "kv_cache_tokens"
        )
    return setting_with(options, trace, model)


def longest_of(trace: Trace) -> int:
    """Tokens that a cache must hold for the longest request."""
    return max(one.prompt_tokens + one.output_tokens for one in trace.arrivals) + 1


def setting_with(options: argparse.Namespace, trace: Trace, model: StepModel) -> Setting:
    """The same, of replicas like that, be their caches too small."""
    service = service_of(options, trace, model)
    if service.spec.replicas is not None:
        _refuse_scaling(options, service.spec.replicas)
    if options.initial_replicas is not None and options.initial_replicas > options.most_pods:
        raise OptionsError(
            f"--initial-replicas={options.initial_replicas} is more than --most-pods={options.most_pods}; "
            "lower the one or raise the other"
        )
    scaling = service.spec.scaling
    # Replicas that are asked for in the first minute come a cold start later. A shorter load is its work in
    # the time that it lasts; one of moments needs no more at once than its work takes in some seconds.
    alone = INTERVAL_SECONDS + options.cold_start_seconds
    seconds = min(alone, max(LEAST_WORK_SECONDS, trace.duration_seconds))
    first = replace(part_of(trace, 0.0, alone), duration_seconds=seconds)
    initial = options.initial_replicas or max(
        scaling.min_replicas,
        min(scaling.max_replicas, guessed_replicas(model, first, target_of(service.spec))),
    )
    return Setting(
        service,
        EngineSettings(
            model=model,
            max_model_len=longest_of(trace),
            limits=Limits(*service.spec.initial_limits),
            enable_prefix_caching=service.spec.prefix_caching,
            speculation=_speculation(options, service.spec.speculative),
        ),
        Conditions(
            initial_replicas=min(
                options.most_pods, initial if service.spec.replicas is None else service.spec.replicas
            ),
            cold_start_seconds=options.cold_start_seconds,
            cold_start_spread=options.cold_start_spread,
            most_pods=options.most_pods,
            interval_seconds=options.interval_seconds,
            scrape_delay_seconds=options.scrape_delay_seconds,
            missing_samples=options.missing_samples,
            deaths_per_pod_hour=options.deaths_per_pod_hour,
            step_time_error=options.step_time_error,
            routing=options.routing,
            seed=options.seed,
        ),
    )


def _refuse_scaling(options: argparse.Namespace, replicas: int) -> None:
    """What a fixed number of replicas leaves without effect."""
    names = ("initial_replicas", "min_replicas", "max_replicas")
    told = f"does nothing beside spec.replicas={replicas} of the manifest; leave one of them out"
    _refuse(options, names, told)
    if options.controller != SHIPPED:
        _refuse(options, ("controller",), told)


def controller_of(options: argparse.Namespace, trace: Trace, setting: Setting) -> Controller[Any]:
    """The one that `--controller` names; a baseline with its documented defaults, told of this very load."""
    if options.controller == SHIPPED:
        return headway()
    baseline = BASELINES[options.controller]
    return baseline.make(known_of(trace, setting), baseline.candidates[0])


def known_of(trace: Trace, setting: Setting) -> Known:
    """What a baseline is told of a load and of a replica; its profile is as wrong as step times are told."""
    model = setting.engine.model
    return Known(
        slower(model, setting.conditions.step_time_error),
        mean_replicas(model, trace),
        peak_replicas(model, trace),
    )


def _speculation(options: argparse.Namespace, spec: Speculative | None) -> Speculation | None:
    """What the flags say, or else the manifest; how often guesses come true only the flag can."""
    number = options.num_speculative_tokens
    if number is None:
        number = 0 if spec is None else spec.num_speculative_tokens
    if not number:
        _refuse(
            options,
            ("acceptance",),
            "is of guesses, and there are none; leave it out, or give --num-speculative-tokens or a manifest "
            "with speculative",
        )
        return None
    acceptance = DEFAULT_ACCEPTANCE if options.acceptance is None else options.acceptance
    return Speculation(number, acceptance, is_adaptive=spec is None or spec.adaptive)
