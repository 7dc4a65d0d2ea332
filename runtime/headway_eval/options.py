"""The flags, read and checked against each other and the models' files, before anything is loaded."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headway_eval.bundled_suite import TASKS_PATH, TEXT_PATH, fits
from headway_eval.errors import ComparisonError, OptionsError
from headway_eval.flags import BUNDLED, DEFAULT_WINDOW_TOKENS, NONE, SAME, build_parser
from headway_eval.side import Side, make_side, split_arguments
from headway_eval.suite_names import unique_names
from headway_eval.tasks import FLAG as TASKS_FLAG
from headway_eval.tasks import Task, read_tasks
from headway_eval.texts import FLAG as TEXT_FLAG
from headway_eval.texts import Text, read_texts
from headway_eval.verdict import DEFAULTS, DEFAULTS_FOUR_BITS, Thresholds
from headway_runtime.errors import ConfigError
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.speculative_options import first_difference

# An evaluation that an operator has started is read by who wrote an InferenceService.
BASELINE_FIELD = "spec.quality.baseline.source of an InferenceService"
BUNDLED_TASKS_NAME = "bundled tasks"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """texts: at least one. window_tokens, stride_tokens: see `windows`. chunk_tokens: computed at once."""

    name: str
    texts: tuple[Text, ...]
    window_tokens: int
    stride_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Suite:
    """One file of tasks, and the name of it in reports."""

    name: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What is judged, by what. text: None where none is scored; then there is at least one suite."""

    model: Side
    baseline: Side
    text: TextOptions | None
    suites: tuple[Suite, ...]
    max_tokens: int
    thresholds: Thresholds
    json_path: Path | None
    verdict_path: Path | None
    log_level: str


def parse_options(argv: Sequence[str]) -> EvalOptions:
    """HeadwayEvalError or HeadwayRuntimeError, naming what is wrong."""
    arguments = build_parser().parse_args(argv)
    json_path = _output_path("--json", arguments.json)
    verdict_path = _output_path("--verdict-file", arguments.verdict_file)
    model, baseline = _sides(arguments)
    text_path = _text_path(arguments.text, model)
    suites = _suites(arguments.tasks, model, baseline)
    text = None if text_path is None else _text_options(arguments, text_path, model, baseline)
    if text is None and not suites:
        raise OptionsError(
            f"{TEXT_FLAG}={arguments.text!r} and {TASKS_FLAG}={arguments.tasks!r}: nothing to judge "
            f"{model.source!r} by; name a file of either (the bundled ones are for the bundled models)"
        )
    return EvalOptions(
        model,
        baseline,
        text,
        suites,
        arguments.max_tokens,
        _thresholds(arguments, model),
        json_path,
        verdict_path,
        arguments.log_level,
    )


def _sides(arguments: argparse.Namespace) -> tuple[Side, Side]:
    is_same = arguments.against == SAME
    of_model, of_baseline = split_arguments(arguments, is_same=is_same)
    model = make_side(arguments.model, of_model)
    source = arguments.model if is_same else arguments.against
    try:
        if is_same:
            choose_quantization(of_baseline["quantization"], model.folder)
        baseline = make_side(source, of_baseline)
        for side in (model, baseline):
            if (num_nodes := side.options.parallel.num_nodes) > 1:
                raise OptionsError(
                    f"--nnodes={num_nodes}: models are judged on one node, one engine after the other; leave "
                    "it out, and give --tensor-parallel-size what this node has"
                )
            if side.options.lora is not None:
                raise OptionsError(
                    "--enable-lora: models are judged without adapters; merge the adapter into the model "
                    "(PEFT's merge_and_unload) and name its folder"
                )
        return model, baseline
    except ConfigError as error:
        remedy = (
            "; the baseline is the model itself without its levers: name another one with --against "
            f"({BASELINE_FIELD}), or say what differs with --baseline-..."
            if is_same
            else ""
        )
        raise ComparisonError(f"--against={arguments.against!r}: {error}{remedy}") from error


def _thresholds(arguments: argparse.Namespace, model: Side) -> Thresholds:
    defaults = DEFAULTS_FOUR_BITS if model.has_four_bits() else DEFAULTS
    given = {field.name: getattr(arguments, field.name) for field in fields(Thresholds)}
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _output_path(flag: str, value: str | None) -> Path | None:
    """Refuse, before anything is measured, what could not be written afterwards."""
    if value is None:
        return None
    path = Path(value)
    if not path.parent.is_dir() or path.is_dir():
        raise OptionsError(f"{flag}={value!r}: is no file in an existing folder; make the folder first")
    return path


def _text_path(value: str | None, model: Side) -> Path | None:
    if value == NONE or (value is None and not fits(model.folder)):
        return None
    if value is None or value == BUNDLED:
        _check_fits(TEXT_FLAG, model)
        return TEXT_PATH
    return Path(value)


def _suites(values: Sequence[str] | None, model: Side, baseline: Side) -> tuple[Suite, ...]:
    if values is None:
        values = [BUNDLED] if fits(model.folder) and fits(baseline.folder) else []
    if NONE in values:
        if len(values) > 1:
            raise OptionsError(f"{TASKS_FLAG}={NONE}: is given beside other tasks; leave one of them out")
        return ()
    values = list(dict.fromkeys(values))
    paths = [Path(BUNDLED_TASKS_NAME if value == BUNDLED else value) for value in values]
    suites = []
    for value, name in zip(values, unique_names(paths), strict=True):
        if value == BUNDLED:
            _check_fits(TASKS_FLAG, model)
            _check_fits(TASKS_FLAG, baseline)
        path = TASKS_PATH if value == BUNDLED else Path(value)
        suites.append(Suite(name, tuple(read_tasks(path))))
    return tuple(suites)


def _check_fits(flag: str, side: Side) -> None:
    if not fits(side.folder):
        raise OptionsError(
            f"{flag}={BUNDLED}: is for the bundled models' tokenizer and chat template, which "
            f"{side.source!r} does not have; name a file"
        )


def _text_options(arguments: argparse.Namespace, path: Path, model: Side, baseline: Side) -> TextOptions:
    _check_vocabularies(model, baseline)
    shorter = min(side.options.max_model_len for side in (model, baseline))
    window = arguments.window_tokens or min(DEFAULT_WINDOW_TOKENS, shorter)
    if window > shorter:
        raise OptionsError(
            f"--window-tokens={window}: a sequence may have {shorter} tokens at most; lower it, or raise "
            "--max-model-len"
        )
    stride = arguments.stride_tokens or window // 2
    if stride >= window:
        raise OptionsError(
            f"--stride-tokens={stride}: is not below --window-tokens={window}, so that tokens would have no "
            "context; lower it"
        )
    name = "bundled text" if path == TEXT_PATH else path.name
    return TextOptions(name, tuple(read_texts(path)), window, stride, min(arguments.chunk_tokens, window))


def _check_vocabularies(model: Side, baseline: Side) -> None:
    sizes = model.model.vocab_size, baseline.model.vocab_size
    # As the message has it: what is said of "it" is the baseline's.
    difference = first_difference(model.folder, baseline.folder)
    if difference is None and sizes[0] != sizes[1]:
        difference = f"vocab_size is {sizes[1]}, the model's {sizes[0]}"
    if difference is not None:
        raise ComparisonError(
            f"--against={baseline.source!r}: its vocabulary is not {model.source!r}'s ({difference}), so "
            f"their distributions cannot be compared; choose another ({BASELINE_FIELD}), or judge "
            f"tasks alone with {TEXT_FLAG} {NONE}"
        )
