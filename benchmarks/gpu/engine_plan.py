"""What the engine is run with: models, batches, prompts, and how many requests at once."""

from dataclasses import dataclass, replace

from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_MOE, TINY_QWEN3, Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, in tokens and requests. traced: sequences of the steps whose use of the GPU is told.

    repeats: of each prompt, of which the median counts. answer: tokens where guesses are looked up.
    """

    llama: Shape
    qwen: Shape
    mixture: Shape
    batches: tuple[int, ...]
    traced: int
    context: int
    steps: int
    prompts: tuple[int, ...]
    longest_prompt: int
    repeats: int
    prefix: int
    answer: int
    load: tuple[int, int, int]
    load_seconds: float


FULL = Plan(
    llama=LLAMA_8B,
    qwen=QWEN3_8B,
    mixture=QWEN3_30B_A3B,
    batches=(1, 8, 32, 128, 256),
    traced=32,
    context=512,
    steps=48,
    prompts=(2048, 8192),
    longest_prompt=32768,
    repeats=3,
    prefix=8192,
    answer=192,
    load=(256, 1024, 1024),
    load_seconds=90.0,
)
# What a first run has the time for.
FIRST = replace(FULL, batches=(1, 32), load=(32, 1024, 1024))
# For the interpreter: one layer, few steps.
_NARROW = {"num_hidden_layers": 1, "vocab_size": 128, "intermediate_size": 64}
SMOKE = Plan(
    llama=TINY | _NARROW,
    qwen=TINY_QWEN3 | _NARROW,
    mixture=TINY_MOE | _NARROW | {"num_experts": 4, "num_experts_per_tok": 2},
    batches=(1, 2),
    traced=2,
    context=8,
    steps=5,
    prompts=(12,),
    longest_prompt=24,
    repeats=1,
    prefix=32,
    answer=8,
    load=(3, 8, 4),
    load_seconds=60.0,
)
