"""`headway simulate`: run the controller and the engine's scheduler through a load, without a GPU."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from headway_operator.slo import target_of
from headway_runtime.cpus import usable_cpus
from headway_simulator.cluster import Simulation
from headway_simulator.context_limit import fitted, with_refused
from headway_simulator.errors import OptionsError, SimulatorError
from headway_simulator.flags import MOST_JOBS, build_parser
from headway_simulator.least_run import oracle_of
from headway_simulator.measures import measures
from headway_simulator.options import controller_of, load_of, setting_of
from headway_simulator.oracle import find_oracle, limits_beside
from headway_simulator.report import as_json, text
from headway_simulator.service_flags import max_model_len_of
from headway_simulator.timeline import levels, timeline
from headway_simulator.unsimulated import Unsimulated, unsimulated

PLOT_FORMATS = (".png", ".svg", ".pdf")
INTERRUPTED_STATUS = 130


def main(argv: list[str]) -> int:
    """Simulate: 0 when done, 2 for flags, traces or manifests that cannot be used."""
    options = build_parser().parse_args(argv)
    try:
        _check_output(options)
        return _run(options)
    except SimulatorError as error:
        print(f"headway simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def _run(options: argparse.Namespace) -> int:
    """Who ends the search for the oracle gets what there is by then."""
    load = load_of(options)
    fit = fitted(load, max_model_len_of(options.service))
    trace = fit.trace
    setting = setting_of(options, trace)
    target = target_of(setting.service.spec)
    taken: dict[str, float] = {}
    controller = controller_of(options, trace, setting)
    jobs = options.jobs or min(MOST_JOBS, usable_cpus())
    is_beside = options.oracle and jobs > 1
    with limits_beside(trace, setting) if is_beside else nullcontext() as limits:
        with _stage(controller.name, taken, is_quiet=options.quiet) as told:
            run = with_refused(Simulation(trace, setting, controller, told).result(), fit.refused)
        found = measures(run, target, setting.engine.model.gpus, trace.step_at_seconds)
        oracle, status = None, 0
        if options.oracle and not fit.refused:
            oracle = oracle_of(run, found, trace, setting)
        if options.oracle and oracle is None:
            try:
                with _stage("oracle", taken, is_quiet=options.quiet) as told:
                    oracle = find_oracle(trace, setting, told, num_processes=jobs, limits=limits)
            except KeyboardInterrupt:
                status = INTERRUPTED_STATUS
    minutes = timeline(run, target)
    # Of a service that flags make up there is no manifest to tell of.
    untold = Unsimulated() if options.service is None else unsimulated(setting.service.spec)
    what = controller.name, load, fit, setting, target, found, oracle, untold
    # What takes minutes is written before anybody's terminal or pipe can fail.
    if options.json is not None:
        _write(options.json, as_json(*what, minutes, run.passes, taken))
    if options.plot is not None:
        from headway_simulator.plot import Timeline, draw

        replicas = oracle.replicas if oracle is not None and oracle.is_attained else None
        drawn = levels(run)
        shown = Timeline(load.name, minutes, drawn, load.duration_seconds, replicas, load.step_at_seconds)
        try:
            draw(options.plot, shown, target)
        except OSError as error:
            raise _unwritable("--plot", options.plot, error) from error
    print(text(*what))
    return status


def _check_output(options: argparse.Namespace) -> None:
    """Refuse, before anything is simulated, what could not be written afterwards, or should not be."""
    if options.jobs is not None and not options.oracle:
        raise OptionsError(f"--jobs={options.jobs} is of the oracle, and --no-oracle leaves it out; give one")
    taken: dict[Path, str] = {}
    for flag in ("trace", "lengths", "service", "step_model"):
        if (value := getattr(options, flag)) is not None:
            taken[Path(value).resolve()] = f"--{flag.replace('_', '-')}"
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is None:
            continue
        if (other := taken.setdefault(path.resolve(), flag)) != flag:
            raise OptionsError(f"{flag}={str(path)!r} is the file of {other}; name another")
        try:
            _try_out(flag, path)
        except OSError as error:
            raise _unwritable(flag, path, error) from error
    if options.plot is None:
        return
    if options.plot.suffix.lower() not in PLOT_FORMATS:
        raise OptionsError(f"--plot={str(options.plot)!r} must end in one of {', '.join(PLOT_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise OptionsError("--plot needs matplotlib; remedy: pip install -e '.[simulate]' in the checkout")


def _try_out(flag: str, path: Path) -> None:
    """Whether a file could be written there, which is left as it is. Raises OptionsError and OSError."""
    if not path.parent.is_dir():
        raise OptionsError(f"{flag}={str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise OptionsError(f"{flag}={str(path)!r} is a folder; name a file in it")
    is_there = path.exists()
    if is_there and not path.is_file():
        # A pipe would take its being opened for all that is to come.
        return
    with path.open("ab"):
        pass
    if not is_there:
        # Of a link, what it names.
        path.resolve().unlink()


def _unwritable(flag: str, path: Path, error: OSError) -> OptionsError:
    return OptionsError(f"{flag}={str(path)!r} cannot be written: {error.strerror or error}")


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable("--json", path, error) from error


@contextmanager
def _stage(name: str, taken: dict[str, float], *, is_quiet: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar from 0 to 1 on a terminal, and how long it took."""
    began = time.monotonic()
    with tqdm(
        total=100, desc=name, unit="%", disable=is_quiet or None, bar_format="{l_bar}{bar}| {elapsed}"
    ) as bar:

        def told(share: float) -> None:
            bar.update(max(0.0, 100 * share - bar.n))

        yield told
        told(1.0)
    taken[name] = round(time.monotonic() - began, 3)
