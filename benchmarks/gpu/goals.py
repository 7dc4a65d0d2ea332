"""The goals on an H200, read off the rows of a run. Knows the rows' names, and measures nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Wanted on an H200: at least, or at most.
BATCH_1_SHARE = 0.8
INT4_RATIO, FP8_RATIO = 2.5, 1.7
DECODE_ATTENTION_SHARE = 0.85
PREFILL_ATTENTION_RATIO = 0.9
QWEN_TOKENS_PER_SECOND = 8500.0
IDLE_SHARE = 0.03
TTFT_RATIO = 1.15

Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Goal:
    """is_least: whether more is better. rows: those that it was read off."""

    name: str
    found: float
    wanted: float
    is_least: bool = True
    rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_reached(self) -> bool:
        return self.found >= self.wanted if self.is_least else self.found <= self.wanted


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Those that the rows say something of."""
    return list(_judged({row["name"]: row for row in rows}))


def _judged(rows: Rows) -> Iterator[Goal]:
    plain = _row(rows, "llama none, decode 1 at ", "step_milliseconds")
    yield from _goal("batch-1 bf16 decode, share of copy bandwidth", plain, "share_of_floor", BATCH_1_SHARE)
    for form, wanted in (("int4", INT4_RATIO), ("fp8", FP8_RATIO)):
        coded = _row(rows, f"llama {form}, decode 1 at ", "step_milliseconds")
        if plain is not None and coded is not None:
            ratio = plain["step_milliseconds"] / coded["step_milliseconds"]
            yield Goal(f"{form} over bf16 at batch 1", ratio, wanted, rows=(plain, coded))
    yield from _goal(
        "decode attention at 8k, batch 32, share of bandwidth",
        _row(rows, "decode attention, 32 at 8192, bfloat16", "share_of_floor"),
        "share_of_floor",
        DECODE_ATTENTION_SHARE,
    )
    yield from _goal(
        "prefill attention over PyTorch's FlashAttention",
        _row(rows, "prefill attention, 8192 of 8192, bfloat16", "flash_over_ours"),
        "flash_over_ours",
        PREFILL_ATTENTION_RATIO,
    )
    yield from _goal(
        "Qwen3-8B 1024/1024 x 256, output tokens/s",
        _row(rows, "qwen3, 256 requests, 1024 in, 1024 out", "output_tokens_per_second"),
        "output_tokens_per_second",
        QWEN_TOKENS_PER_SECOND,
    )
    idle = _row(rows, "llama none, GPU use of decode 32 at ", "gpu_idle_share")
    yield from _goal("GPU idle at batch 32", idle, "gpu_idle_share", IDLE_SHARE, is_least=False)
    prompt = _row(rows, "llama none, prompt of 2048", "ttft_over_compute")
    name = "TTFT of a 2k prompt over its compute"
    yield from _goal(name, prompt, "ttft_over_compute", TTFT_RATIO, is_least=False)


def _goal(
    name: str, row: Mapping[str, Any] | None, field: str, wanted: float, *, is_least: bool = True
) -> Iterator[Goal]:
    """None of a row that is not there, or does not say it."""
    if row is not None and field in row:
        yield Goal(name, float(row[field]), wanted, is_least, (row,))


def _row(rows: Rows, prefix: str, field: str) -> Mapping[str, Any] | None:
    """The first whose name begins so and that has the field."""
    return next((row for name, row in rows.items() if name.startswith(prefix) and field in row), None)
