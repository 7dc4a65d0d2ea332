"""The report on a terminal: plain lines; prints nothing itself."""

from collections.abc import Sequence

from headway_eval.options import EvalOptions
from headway_eval.session import EvalResult
from headway_eval.side import Side
from headway_eval.task_summary import SuiteSummary, TaskSummary
from headway_eval.text_summary import TextSummary
from headway_eval.verdict import Check, Verdict


def render(options: EvalOptions, result: EvalResult) -> str:
    lines = [_side("model", options.model), _side("baseline", options.baseline)]
    if result.text is not None and options.text is not None:
        lines += ["", *_text(options.text.name, result.text)]
    for suite in result.suites:
        lines += ["", *_suite(suite.summary)]
    return "\n".join([*lines, "", *_verdict(result.verdict)])


def _side(name: str, side: Side) -> str:
    levers = ", ".join(f"{lever.replace('_', ' ')} {value}" for lever, value in side.levers().items())
    return f"{name:<9} {side.source}: {levers}"


def _text(name: str, text: TextSummary) -> list[str]:
    low, high = text.perplexity_increase_interval
    rows = [
        ["", "model", "baseline", "change", "95%"],
        [
            "perplexity",
            f"{text.model_perplexity:.4f}",
            f"{text.baseline_perplexity:.4f}",
            f"{100 * text.perplexity_increase:+.2f}%",
            f"[{100 * low:+.2f}%, {100 * high:+.2f}%]",
        ],
    ]
    divergence = (
        f"KL divergence, nats: mean {text.mean_kl:.3g}, P99 {text.p99_kl:.3g}, largest {text.largest_kl:.3g}"
    )
    agreement = f"the same likeliest token at {100 * text.same_choice_share:.2f}% of positions"
    return [
        f"{name}: {text.num_tokens} tokens of {text.num_texts} texts",
        *_aligned(rows),
        f"{divergence}; {agreement}",
    ]


def _suite(suite: SuiteSummary) -> list[str]:
    rows = [["tasks", "", "model", "95%", "baseline", "95%", "lost", "won", "p"]]
    parts = suite.kinds if len(suite.kinds) > 1 else ()
    rows += [_task_row(one) for one in (*parts, suite.whole)]
    return _aligned(rows)


def _task_row(one: TaskSummary) -> list[str]:
    return [
        one.name,
        str(one.num_tasks),
        _percent(one.model_accuracy),
        _interval(one.model_interval),
        _percent(one.baseline_accuracy),
        _interval(one.baseline_interval),
        str(one.num_lost),
        str(one.num_won),
        f"{one.probability_by_chance:.2g}",
    ]


def _verdict(verdict: Verdict) -> list[str]:
    rows = [["check", "measured", "at most", ""]]
    rows += [
        [
            check.name,
            _value(check, check.value),
            _value(check, check.limit),
            "passed" if check.passed else "FAILED",
        ]
        for check in verdict.checks
    ]
    notes = [f"{check.name}: {check.note}" for check in verdict.checks if check.note]
    return [*_aligned(rows), *notes, "", f"verdict: {'passed' if verdict.passed else 'FAILED'}"]


def _value(check: Check, value: float) -> str:
    if check.unit == "points":
        return f"{value:.1f} points"
    return f"{100 * value:.2f}%" if check.unit == "share" else f"{value:.3g} nats"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _interval(interval: tuple[float, float]) -> str:
    return f"[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
