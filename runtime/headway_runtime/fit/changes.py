"""What would make a model fit that does not: the nearest changes, those that cost least first.

Each is tried by the same sum. Pairs are only offered where neither of the two does it alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headway_runtime.fit.gpu_kinds import GPU_KINDS, gpu_placement
from headway_runtime.fit.memory_fit import Fit, Question, assess, with_sequences
from headway_runtime.fit.placement import can_cut
from headway_runtime.quantization.choice import ONLINE, Quantization

# Of a context shorter than this, or than this part of what was asked for, there is not much use.
LEAST_CONTEXT = 512
LEAST_SHARE = 16
RANKS = (2, 4, 8)
MOST_GPU_KINDS = 2
OFFLOAD_STEP_BYTES = 2**26
TOKENS_STEP, LEAST_TOKENS = 256, 512
# What costs more stands further down.
COSTS = {
    "kv_offloading_size": (0, "fewer prefixes kept outside of the KV cache"),
    "max_num_batched_tokens": (0, "prompts take more steps"),
    "max_num_seqs": (0, "fewer sequences at once: others wait"),
    "kv_cache_dtype": (1, "keys and values rounded to 8 bits"),
    "fp8": (2, "weights rounded to 8 bits"),
    "int8": (3, "weights rounded to 8 bits"),
    "max_model_len": (4, "longer prompts are refused"),
    "int4": (5, "weights rounded to 4 bits: check the quality with care"),
    "tensor_parallel_size": (20, "more GPUs"),
    "gpu": (21, "another GPU"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """flags: as a user would write them. cost: what it takes away. fit: what it comes to."""

    flags: str
    cost: str
    fit: Fit


@dataclass(frozen=True, slots=True)
class _Candidate:
    names: tuple[str, ...]
    flags: str
    question: Question

    @property
    def rank(self) -> tuple[int, ...]:
        costs = [COSTS[name][0] for name in self.names]
        return max(costs), len(costs), sum(costs)

    @property
    def cost(self) -> str:
        return "; ".join(dict.fromkeys(COSTS[name][1] for name in self.names))


Holds = Callable[[Fit], bool]


def nearest_changes(question: Question, holds: Holds, *, with_hardware: bool = True) -> list[Change]:
    """In the order of what they cost. holds: whether an answer is good enough."""
    found: list[_Candidate] = []
    alone = [one for one in _single(question, holds) if holds(assess(one.question))]
    found += alone
    done = {one.names[0] for one in alone}
    found += [
        one
        for one in _pairs(question, holds)
        if not done.intersection(one.names) and holds(assess(one.question))
    ]
    if with_hardware:
        found += _hardware(question, holds)
    found.sort(key=lambda one: one.rank)
    return [_change(one) for one in found]


def _change(one: _Candidate) -> Change:
    fit = assess(one.question)
    # An engine left to itself keeps a part of what is free for others.
    own = f" --kv-cache-memory-bytes {fit.wanted_kv_bytes}"
    return Change(one.flags + (own if fit.default_kv_bytes < fit.wanted_kv_bytes else ""), one.cost, fit)


def _single(question: Question, holds: Holds) -> Iterator[_Candidate]:
    fewer = _fewer_sequences(question, holds)
    if fewer is not None:
        yield fewer
    smaller = _smaller_offload(question, holds)
    if smaller is not None:
        yield smaller
    slighter = _smaller_step(question, holds)
    if slighter is not None:
        yield slighter
    yield from _coded(question)
    shorter = _shorter(question, holds)
    if shorter is not None:
        yield shorter


def _coded(question: Question) -> Iterator[_Candidate]:
    """KV or weights of fewer bits."""
    kv = _with_coded_kv(question)
    if kv is not None:
        yield kv
    if question.model.quantization.name == "none":
        for online in ONLINE:
            loaded = replace(question.model, quantization=Quantization(online, online=online))
            changed = replace(question, model=loaded)
            yield _Candidate((online,), f"--quantization {online}", changed)


def _pairs(question: Question, holds: Holds) -> Iterator[_Candidate]:
    for first in (*_coded(question), *_down_to_context(question)):
        second = _with_coded_kv(first.question) if first.names != ("kv_cache_dtype",) else None
        if second is not None:
            yield _joined(first, second)
        is_shorter = first.names == ("max_model_len",)
        shorter = None if is_shorter else _shorter(first.question, holds)
        if shorter is not None:
            yield _joined(first, shorter)
        fewer = _fewer_sequences(first.question, holds)
        if fewer is not None:
            yield _joined(first, fewer)


def _down_to_context(question: Question) -> Iterator[_Candidate]:
    """No longer than the sequences that are to fit."""
    length = -(-question.context // question.block_size) * question.block_size
    if length < question.max_model_len:
        changed = replace(question, max_model_len=length)
        yield _Candidate(("max_model_len",), f"--max-model-len {length}", changed)


def _joined(first: _Candidate, second: _Candidate) -> _Candidate:
    return _Candidate(first.names + second.names, f"{first.flags} {second.flags}", second.question)


def _with_coded_kv(question: Question) -> _Candidate | None:
    if question.kv_cache_dtype not in ("auto", "bfloat16"):
        return None
    changed = replace(question, kv_cache_dtype="fp8")
    return _Candidate(("kv_cache_dtype",), "--kv-cache-dtype fp8", changed)


def _fewer_sequences(question: Question, holds: Holds) -> _Candidate | None:
    highest = question.num_sequences - 1
    most = _largest(1, highest, lambda number: holds(assess(with_sequences(question, number))))
    if most is None:
        return None
    return _Candidate(("max_num_seqs",), f"--max-num-seqs {most}", with_sequences(question, most))


def _smaller_step(question: Question, holds: Holds) -> _Candidate | None:
    """Fewer tokens at once, whose activations and workspace are smaller."""

    def with_steps(steps: int) -> Question:
        return replace(question, max_num_batched_tokens=steps * TOKENS_STEP)

    low = -(-max(LEAST_TOKENS, question.max_num_seqs) // TOKENS_STEP)
    high = (min(question.max_num_batched_tokens, question.max_model_len) - 1) // TOKENS_STEP
    most = _largest(low, high, lambda number: holds(assess(with_steps(number))))
    if most is None:
        return None
    flags = f"--max-num-batched-tokens {most * TOKENS_STEP}"
    return _Candidate(("max_num_batched_tokens",), flags, with_steps(most))


def _smaller_offload(question: Question, holds: Holds) -> _Candidate | None:
    """Less host memory for prefixes, where that is the device's own."""
    if not question.placement.is_cpu:
        return None

    def with_steps(steps: int) -> Question:
        return replace(question, offload_bytes=steps * OFFLOAD_STEP_BYTES)

    steps = -(-question.offload_bytes // OFFLOAD_STEP_BYTES) - 1
    most = _largest(1, steps, lambda number: holds(assess(with_steps(number))))
    if most is None:
        return None
    flags = f"--kv-offloading-size {most * OFFLOAD_STEP_BYTES / 2**30:g}"
    return _Candidate(("kv_offloading_size",), flags, with_steps(most))


def _shorter(question: Question, holds: Holds) -> _Candidate | None:
    size = question.block_size
    least = max(LEAST_CONTEXT, question.max_model_len // LEAST_SHARE)

    def with_length(blocks: int) -> Question:
        length = blocks * size
        return replace(question, max_model_len=length, context=min(question.context, length))

    low, high = -(-least // size), (question.max_model_len - 1) // size
    most = _largest(low, high, lambda blocks: holds(assess(with_length(blocks))))
    if most is None:
        return None
    return _Candidate(("max_model_len",), f"--max-model-len {most * size}", with_length(most))


def _largest(low: int, high: int, is_good: Callable[[int], bool]) -> int | None:
    """The largest good number from low to high; what is good stays so further down."""
    if low > high or not is_good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if is_good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _hardware(question: Question, holds: Holds) -> Iterator[_Candidate]:
    if question.placement.is_cpu:
        return
    for ranks in RANKS:
        if ranks <= question.num_ranks or not can_cut(question.model.config, ranks):
            continue
        changed = replace(question, num_ranks=ranks)
        if holds(assess(changed)):
            yield _Candidate(("tensor_parallel_size",), f"--tensor-parallel-size {ranks}", changed)
            break
    larger = sorted(GPU_KINDS.values(), key=lambda kind: kind.memory_bytes)
    found = 0
    for kind in larger:
        placement = gpu_placement(question.placement.dtype, kind)
        changed = replace(question, memory_bytes=kind.memory_bytes, placement=placement)
        if kind.memory_bytes > question.memory_bytes and holds(assess(changed)):
            yield _Candidate(("gpu",), f"--gpu {kind.name}", changed)
            found += 1
            if found == MOST_GPU_KINDS:
                return
