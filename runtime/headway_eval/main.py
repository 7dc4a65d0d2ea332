"""`headway eval`: judge a quantized or otherwise changed model against a baseline, with an exit status."""

import logging
import sys

from headway_runtime.server.lifeline import watch_lifeline

from headway_eval.errors import HeadwayEvalError
from headway_eval.flags import build_parser
from headway_eval.options import EvalOptions, parse_options
from headway_eval.report import build_report, write_report
from headway_eval.table import render
from headway_eval.verdict_file import write_verdict
from headway_runtime.errors import HeadwayRuntimeError
from headway_runtime.sources.interrupts import InterruptedBySignal, raising_on_sigterm

PASSED_STATUS, FAILED_STATUS, NOT_JUDGED_STATUS = 0, 1, 2
INTERRUPTED_STATUS = 130

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run one evaluation: 0 passed, 1 failed, 2 could not judge."""
    try:
        # At once, as models may have to be fetched before the options are known.
        if (lifeline_fd := build_parser().parse_args(argv).lifeline_fd) is not None:
            watch_lifeline(lifeline_fd)
        with raising_on_sigterm():
            options = parse_options(argv)
        logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr)
        return _run(options)
    except (HeadwayEvalError, HeadwayRuntimeError) as error:
        print(f"headway eval: could not judge: {error}", file=sys.stderr)
        return NOT_JUDGED_STATUS
    except InterruptedBySignal as interrupt:
        print(f"headway eval: {interrupt}", file=sys.stderr)
        return interrupt.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except Exception as error:
        # Left alone it would end with 1, which is a verdict on the model.
        logger.exception("the evaluation broke off")
        print(f"headway eval: could not judge: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_JUDGED_STATUS


def _run(options: EvalOptions) -> int:
    # Only now, as torch takes seconds: no mistake in the options waits for it.
    from headway_eval.session import run

    result = run(options)
    print(render(options, result))
    if options.json_path is not None:
        write_report(options.json_path, build_report(options, result))
    if options.verdict_path is not None:
        write_verdict(options.verdict_path, options, result)
    return PASSED_STATUS if result.verdict.passed else FAILED_STATUS
