"""One evaluation from its options to its verdict: the text, then the tasks, then the thresholds."""

import gc
from dataclasses import dataclass

from headway_eval.options import EvalOptions
from headway_eval.task_run import SuiteResult, compare_answers, encode_tasks
from headway_eval.text_run import encode_texts, score
from headway_eval.text_summary import TextSummary
from headway_eval.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class EvalResult:
    """text: None where none was scored."""

    text: TextSummary | None
    suites: tuple[SuiteResult, ...]
    verdict: Verdict


def run(options: EvalOptions) -> EvalResult:
    """HeadwayEvalError or HeadwayRuntimeError for what cannot be judged."""
    encoded = None if options.text is None else encode_texts(options.model, options.text.texts)
    for side in (options.model, options.baseline):
        for suite in options.suites:
            # A prompt that cannot be answered is said before any model is loaded.
            encode_tasks(side, suite.tasks)
    text = None
    if options.text is not None and encoded is not None:
        text = score(options, options.text, encoded)
        _give_memory_back()
    suites = tuple(compare_answers(options)) if options.suites else ()
    return EvalResult(text, suites, judge(text, [one.summary for one in suites], options.thresholds))


def _give_memory_back() -> None:
    """Both models' memory to whoever loads the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
