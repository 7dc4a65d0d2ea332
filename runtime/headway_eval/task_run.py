"""Has both models answer the same tasks, one model after the other, greedily, by the in-process engine."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from headway_eval.errors import ComparisonError, InputFileError
from headway_eval.matching import is_right
from headway_eval.options import EvalOptions, Suite
from headway_eval.progress import progress
from headway_eval.side import Side
from headway_eval.task_summary import Paired, SuiteSummary, summarize_suite
from headway_eval.tasks import Task
from headway_runtime.errors import InvalidRequestError
from headway_runtime.generation_output import CompletionOutput
from headway_runtime.inprocess import Engine
from headway_runtime.prompt_encoding import PromptEncoder, TemplateArguments
from headway_runtime.sampling_params import SamplingParams

# Prompts that wait in the engine at once, for each sequence that it may run.
PROMPTS_PER_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class Changed:
    """A task that only one of the two got right, and what each said."""

    place: str
    want: object
    model_answer: str
    baseline_answer: str
    model_right: bool


@dataclass(frozen=True, slots=True)
class SuiteResult:
    summary: SuiteSummary
    changed: tuple[Changed, ...]


def encode_tasks(side: Side, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """Token ids of each prompt. InputFileError for what this model cannot read, or has no room to answer."""
    encoder = PromptEncoder(side.folder, side.model.vocab_size)
    encoded = []
    for task in tasks:
        try:
            if isinstance(task.prompt, str):
                token_ids = encoder.encode(task.prompt).token_ids
            else:
                token_ids = encoder.encode_chat(task.prompt, TemplateArguments()).token_ids
        except InvalidRequestError as error:
            raise InputFileError(f"{task.place}: {error}") from error
        if len(token_ids) >= side.options.max_model_len:
            raise InputFileError(
                f"{task.place}: the prompt has {len(token_ids)} tokens of {side.source!r}, whose prompt and "
                f"answer may have {side.options.max_model_len} together; shorten it, or raise --max-model-len"
            )
        encoded.append(token_ids)
    return encoded


def answer(side: Side, suites: Sequence[Suite], max_tokens: int, label: str) -> list[list[CompletionOutput]]:
    """One answer to each task of each suite."""
    tasks = [task for suite in suites for task in suite.tasks]
    encoded = encode_tasks(side, tasks)
    params = [SamplingParams(temperature=0.0, max_tokens=task.max_tokens or max_tokens) for task in tasks]
    size = min(side.options.max_waiting, PROMPTS_PER_SEQUENCE * side.options.envelope.max_num_seqs)
    answers: list[CompletionOutput] = []
    with Engine(str(side.folder), **side.keywords) as engine:
        with progress(f"tasks, {label}", len(tasks), "answers") as step:
            for start in range(0, len(tasks), size):
                outputs = engine.generate(
                    encoded[start : start + size], params[start : start + size], use_tqdm=False
                )
                answers += (output.outputs[0] for output in outputs)
                step(len(outputs))
    remaining = iter(answers)
    return [list(itertools.islice(remaining, len(suite.tasks))) for suite in suites]


def compare_answers(options: EvalOptions) -> list[SuiteResult]:
    """ComparisonError if the baseline itself fails to answer; a failure of the model is a wrong answer."""
    by_baseline = answer(options.baseline, options.suites, options.max_tokens, "baseline")
    for suite, answers in zip(options.suites, by_baseline, strict=True):
        for task, one in zip(suite.tasks, answers, strict=True):
            if one.finish_reason == "error":
                raise ComparisonError(
                    f"--against={options.baseline.source!r}: failed to answer {task.place} ({one.error}), so "
                    "nothing can be held against it; check its weights, or give it another --baseline-dtype"
                )
    by_model = answer(options.model, options.suites, options.max_tokens, "model")
    return [
        _compare_suite(suite, model, baseline)
        for suite, model, baseline in zip(options.suites, by_model, by_baseline, strict=True)
    ]


def _compare_suite(
    suite: Suite, model: Sequence[CompletionOutput], baseline: Sequence[CompletionOutput]
) -> SuiteResult:
    outcomes, changed = [], []
    for task, own, other in zip(suite.tasks, model, baseline, strict=True):
        right = _is_right(task, own), _is_right(task, other)
        outcomes.append(Paired(task.kind, *right))
        if right[0] != right[1]:
            given = own.error or own.text if own.finish_reason == "error" else own.text
            changed.append(Changed(task.place, task.want, given, other.text, right[0]))
    return SuiteResult(summarize_suite(suite.name, outcomes), tuple(changed))


def _is_right(task: Task, output: CompletionOutput) -> bool:
    return output.finish_reason != "error" and is_right(task.match, task.want, output.text)
