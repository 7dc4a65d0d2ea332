"""`headway bench`: send a load to any OpenAI-compatible server and report what its clients see."""

import asyncio
import sys
from importlib.util import find_spec

from headway.event_loop import loop_factory
from headway_bench.conditions import client_conditions, now
from headway_bench.config import BenchConfig
from headway_bench.errors import InputFileError, OptionsError, TargetError
from headway_bench.material import read_files
from headway_bench.options import parse_config
from headway_bench.report import build_report, write_report
from headway_bench.session import SessionResult, run_session
from headway_bench.table import render_point, render_sweep

INTERRUPTED_STATUS = 130


def main(argv: list[str]) -> int:
    """Run one benchmark: 0 when measured, 1 when nothing was (or --fail-on-error), 2 for wrong flags."""
    config = parse_config(argv)
    try:
        return _run(config)
    except (OptionsError, InputFileError) as error:
        print(f"headway bench: {error}", file=sys.stderr)
        return 2
    except TargetError as error:
        print(f"headway bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def _run(config: BenchConfig) -> int:
    plot_path = config.report.plot_path
    _check_output(config)
    files = read_files(config)
    conditions, started_at = client_conditions(), now()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        result = runner.run(run_session(config, files))
    if result is None:
        return INTERRUPTED_STATUS
    _show(config, result)
    if config.report.json_path is not None:
        write_report(config.report.json_path, build_report(config, result, conditions, started_at, now()))
    if plot_path is not None and result.points:
        from headway_bench.plot import draw

        draw(plot_path, result.points, f"{result.material.facts.model} at {config.server.base_url}")
    if result.was_interrupted:
        return INTERRUPTED_STATUS
    if not any(point.summary.num_completed for point in result.points):
        print(
            "headway bench: no request completed, so nothing was measured; what failed is told above",
            file=sys.stderr,
        )
        return 1
    any_failed = any(point.summary.num_failed for point in result.points)
    return 1 if config.report.fail_on_error and any_failed else 0


def _show(config: BenchConfig, result: SessionResult) -> None:
    material = result.material
    print(
        f"{config.server.base_url} {config.server.endpoint}, model {material.facts.model}, "
        f"version {material.facts.version or 'unknown'}; prompt lengths by {material.writer.length_source}, "
        f"{material.overhead_tokens} tokens of each prompt are the server's own"
    )
    for point in result.points:
        print(f"\n{render_point(point, config.report.confidence)}")
    if len(result.points) > 1:
        print(f"\n{render_sweep(result.points)}")
    if result.was_interrupted:
        print("\ninterrupted: this is what was measured until then")


def _check_output(config: BenchConfig) -> None:
    """Refuse, before anything is measured, what could not be written afterwards."""
    for flag, path in (("--json", config.report.json_path), ("--plot", config.report.plot_path)):
        if path is not None and not path.parent.is_dir():
            raise OptionsError(
                f"{flag}={str(path)!r}: there is no folder {str(path.parent)!r}; make it first"
            )
    if config.report.plot_path is None:
        return
    if find_spec("matplotlib") is None:
        raise OptionsError("--plot needs matplotlib; remedy: pip install -e '.[bench]' in the checkout")
    from headway_bench.plot import check_plot_path

    check_plot_path(config.report.plot_path)
