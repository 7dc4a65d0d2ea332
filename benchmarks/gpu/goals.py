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
    """is_least: whether more is better."""

    name: str
    found: float
    wanted: float
    is_least: bool = True

    @property
    def is_reached(self) -> bool:
        return self.found >= self.wanted if self.is_least else self.found <= self.wanted


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Those that the rows say something of."""
    return list(_judged({row["name"]: row for row in rows}))


def _judged(rows: Rows) -> Iterator[Goal]:
    plain = _value(rows, "llama none, decode 1 at ", "step_milliseconds")
    share = _value(rows, "llama none, decode 1 at ", "share_of_floor")
    if share is not None:
        yield Goal("batch-1 bf16 decode, share of copy bandwidth", share, BATCH_1_SHARE)
    for form, wanted in (("int4", INT4_RATIO), ("fp8", FP8_RATIO)):
        coded = _value(rows, f"llama {form}, decode 1 at ", "step_milliseconds")
        if plain is not None and coded is not None:
            yield Goal(f"{form} over bf16 at batch 1", plain / coded, wanted)
    share = _value(rows, "decode attention, 32 at 8192, bfloat16", "share_of_floor")
    if share is not None:
        yield Goal("decode attention at 8k, batch 32, share of bandwidth", share, DECODE_ATTENTION_SHARE)
    ratio = _value(rows, "prefill attention, 8192 of 8192, bfloat16", "flash_over_ours")
    if ratio is not None:
        yield Goal("prefill attention over PyTorch's FlashAttention", ratio, PREFILL_ATTENTION_RATIO)
    rate = _value(rows, "qwen3, 256 requests, 1024 in, 1024 out", "output_tokens_per_second")
    if rate is not None:
        yield Goal("Qwen3-8B 1024/1024 x 256, output tokens/s", rate, QWEN_TOKENS_PER_SECOND)
    idle = _value(rows, "llama none, GPU use of decode 32 at ", "gpu_idle_share")
    if idle is not None:
        yield Goal("GPU idle at batch 32", idle, IDLE_SHARE, is_least=False)
    ratio = _value(rows, "llama none, prompt of 2048", "ttft_over_compute")
    if ratio is not None:
        yield Goal("TTFT of a 2k prompt over its compute", ratio, TTFT_RATIO, is_least=False)


def _value(rows: Rows, prefix: str, field: str) -> float | None:
    """Of the first row whose name begins so and that has it."""
    for name, row in rows.items():
        if name.startswith(prefix) and field in row:
            return float(row[field])
    return None
