"""The levers, in the order in which they are pulled, and the sizes of the workload. Decides nothing else.

Each row has all that the rows before it have. A lever is either the server's (flags of `headway serve`) or
the client's: whether answers are streamed, where the static part of a prompt stands, how long answers may be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Asking:
    """What clients do. is_capped: answers end after `Sizes.answer_tokens`."""

    is_streamed: bool = False
    is_static_first: bool = False
    is_capped: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One state of all levers. flags: of `headway serve`, by name; None for those without a value."""

    name: str
    asking: Asking = field(default_factory=Asking)
    flags: Mapping[str, str | None] = field(default_factory=dict)

    def then(self, name: str, asking: Asking | None = None, **flags: str | None) -> "Row":
        """The next row: this one and one lever more."""
        named = {f"--{key.replace('_', '-')}": value for key, value in flags.items()}
        return replace(self, name=name, asking=asking or self.asking, flags={**self.flags, **named})


@dataclass(frozen=True, slots=True)
class Sizes:
    """The workload. Lengths in tokens, times in milliseconds: the SLO's, P95 of TTFT and P99 of ITL.

    uncapped_tokens: least and most that an answer has which nobody caps, drawn evenly between them.
    kv_cache_memory: tight enough that the type of the KV decides how many sequences run at once.
    """

    prefix_tokens: int
    answer_tokens: int
    uncapped_tokens: tuple[int, int]
    target_users: int
    users: tuple[int, ...]
    ttft_milliseconds: float
    itl_milliseconds: float
    kv_cache_memory: str
    max_num_seqs: int
    whole_prompt_tokens: int
    chunk_tokens: int
    chunk_sizes: tuple[int, ...]
    quantization: str
    kv_cache_dtype: str

    @property
    def max_model_len(self) -> int:
        """Room for a document, what is asked about it, and the longest answer."""
        return self.prefix_tokens + self.uncapped_tokens[1] + 128


# What two CPU cores can do: the lengths are 0.4 of those on a GPU.
CPU = Sizes(
    prefix_tokens=1600,
    answer_tokens=120,
    uncapped_tokens=(120, 360),
    target_users=8,
    users=(1, 2, 4, 8, 12, 16, 24, 32, 48),
    ttft_milliseconds=4000.0,
    itl_milliseconds=250.0,
    kv_cache_memory="192Mi",
    max_num_seqs=32,
    whole_prompt_tokens=2048,
    chunk_tokens=128,
    chunk_sizes=(64, 128, 512, 2048),
    quantization="int4",
    kv_cache_dtype="int8",
)
GPU = Sizes(
    prefix_tokens=4000,
    answer_tokens=300,
    uncapped_tokens=(300, 900),
    target_users=64,
    users=(1, 4, 8, 16, 32, 64, 128, 256),
    ttft_milliseconds=500.0,
    itl_milliseconds=50.0,
    kv_cache_memory="16Gi",
    max_num_seqs=256,
    whole_prompt_tokens=8192,
    chunk_tokens=1024,
    chunk_sizes=(256, 512, 1024, 2048, 8192),
    quantization="fp8",
    kv_cache_dtype="fp8",
)


def rows(sizes: Sizes, speculative_config: str) -> list[Row]:
    """From a server and clients that know of no lever to those that pull them all."""
    whole = {
        "--max-num-batched-tokens": str(sizes.whole_prompt_tokens),
        "--long-prefill-share": "1",
        "--prefill-doubling-context": "0",
    }
    baseline = Row("baseline", flags={**whole, "--no-enable-prefix-caching": None})
    streaming = baseline.then("streaming", Asking(is_streamed=True))
    without = {key: value for key, value in streaming.flags.items() if key != "--no-enable-prefix-caching"}
    cached = Row("static prefix first, prefix cache", Asking(is_streamed=True, is_static_first=True), without)
    capped = cached.then("output cap", replace(cached.asking, is_capped=True))
    quantized = capped.then("quantized weights", quantization=sizes.quantization)
    chunked = quantized.then("chunked prefill", max_num_batched_tokens=str(sizes.chunk_tokens))
    kv = chunked.then("quantized KV", kv_cache_dtype=sizes.kv_cache_dtype)
    speculation = kv.then("speculation", speculative_config=speculative_config)
    return [baseline, streaming, cached, capped, quantized, chunked, kv, speculation]
