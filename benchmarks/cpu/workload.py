"""What is asked of every peer, and what is kept of its answers."""

import random
import statistics
from dataclasses import dataclass, field

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
PREFIX_TOKENS = 1500
SUFFIX_TOKENS = 16
# The first ids are special tokens.
FIRST_PLAIN_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: how often each visit measures each batch size, by batch size; medians are reported."""

    rounds: dict[int, int]
    num_prefixes: int


FULL = Plan(rounds={1: 8, 4: 4, 16: 4, 64: 1}, num_prefixes=3)
QUICK = Plan(rounds={1: 2, 4: 1, 16: 1, 64: 1}, num_prefixes=2)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times, in seconds of one clock. first_at, last_at: of its first and last token."""

    sent_at: float
    first_at: float
    last_at: float
    num_tokens: int

    @property
    def ttft_seconds(self) -> float:
        return self.first_at - self.sent_at


@dataclass(slots=True)
class BatchResult:
    """All rounds of one batch size."""

    tokens_per_second: list[float] = field(default_factory=list)
    ttft_seconds: list[float] = field(default_factory=list)
    decode_tokens_per_second: list[float] = field(default_factory=list)

    def add(self, answers: list[Answer]) -> None:
        num_tokens = sum(answer.num_tokens for answer in answers)
        began, ended = min(one.sent_at for one in answers), max(one.last_at for one in answers)
        self.tokens_per_second.append(num_tokens / (ended - began))
        self.ttft_seconds.extend(answer.ttft_seconds for answer in answers)
        # While all of them decode: from the last first token to the first last one.
        start, end = max(one.first_at for one in answers), min(one.last_at for one in answers)
        if end > start:
            rates = [(one.num_tokens - 1) / (one.last_at - one.first_at) for one in answers]
            self.decode_tokens_per_second.append(sum(rates))

    def summary(self) -> dict[str, float | None]:
        decode = self.decode_tokens_per_second
        return {
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "decode_tokens_per_second": statistics.median(decode) if decode else None,
            "ttft_p50_milliseconds": statistics.median(self.ttft_seconds) * 1e3,
            "ttft_p95_milliseconds": percentile(self.ttft_seconds, 95) * 1e3,
        }


@dataclass(slots=True)
class PrefixResult:
    """Seconds to the first token of prompts whose prefix was new, and of those that found it cached."""

    misses: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        miss, hit = statistics.median(self.misses), statistics.median(self.hits)
        return {"miss_milliseconds": miss * 1e3, "hit_milliseconds": hit * 1e3, "ratio": miss / hit}


def percentile(values: list[float], percent: float) -> float:
    """Linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids; another seed shares no prefix with this one."""
    source = random.Random(seed)
    return [[source.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(length)] for _ in range(count)]
