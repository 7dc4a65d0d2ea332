"""What a lever makes of a replica: its step model, by the bytes and FLOPs that `headway plan` adds up.

A step model comes from a GPU's data sheet, or was measured. From the data sheet, with the costs of
`step_costs` over the efficiency:

    base = weights read, prefill = arithmetic of a token and of a pair, decode = arithmetic of a sequence
    and reading its context, a draft's guess = its weights read

which are added up where a bound would take the greater: engines overlap them in part only. A lever
multiplies each coefficient by how the arithmetic changes, so that what was measured keeps its measured
distance from the data sheet. What a lever costs in quality, and what GPUs lose by talking to each other, is
in none of this.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway_runtime.fit.bounds import step_costs
from headway_runtime.fit.gpu_kinds import GpuKind
from headway_runtime.fit.memory_fit import Fit, Question, assess
from headway_runtime.fit.placement import can_cut
from headway_runtime.quantization.choice import ONLINE, Quantization
from headway_simulator.simulated_runner import Speculation
from headway_simulator.step_model import StepModel

# At how many sequences a mixture's experts are counted.
CONCURRENCY = 16
NUM_GUESSES = 3
PLAIN = "as it is"


@dataclass(frozen=True, slots=True)
class Lever:
    """flags: as a user would write them. fit: what it comes to on a GPU.

    speculation: the service's own, or that of the lever; None without.
    """

    flags: str
    fit: Fit
    speculation: Speculation | None = None


def levers(question: Question, own: Speculation | None, acceptance: float) -> Iterator[Lever]:
    """The service as it is, then each lever that it does not have yet, alone.

    own: how the service guesses already, which it goes on doing with any lever. acceptance: of guesses where
    guessing is the lever.
    """
    yield Lever(PLAIN, assess(question), own)
    if question.model.quantization.name == "none":
        for online in ONLINE:
            loaded = replace(question.model, quantization=Quantization(online, online=online))
            yield Lever(f"--quantization {online}", assess(replace(question, model=loaded)), own)
    if question.kv_cache_dtype in ("auto", "bfloat16"):
        yield Lever("--kv-cache-dtype fp8", assess(replace(question, kv_cache_dtype="fp8")), own)
    ranks = 2 * question.num_ranks
    if can_cut(question.model.config, ranks):
        yield Lever(f"--tensor-parallel-size {ranks}", assess(replace(question, num_ranks=ranks)), own)
    if own is None:
        config = f'{{"method": "ngram", "num_speculative_tokens": {NUM_GUESSES}}}'
        guesses = Speculation(NUM_GUESSES, acceptance)
        yield Lever(f"--speculative-config '{config}'", assess(question), guesses)


def from_data_sheet(fit: Fit, kind: GpuKind, efficiency: float) -> StepModel:
    """A replica whose engine reaches that share of what the data sheet allows."""
    costs = step_costs(fit, kind, CONCURRENCY)

    def milliseconds(seconds: float) -> float:
        return 1000 * seconds / efficiency

    return StepModel(
        name=f"{kind.name}, {efficiency:g} of its data sheet",
        base_milliseconds=milliseconds(costs.weights),
        prefill_token_milliseconds=milliseconds(costs.prefill_token),
        prefill_context_milliseconds=milliseconds(costs.prefill_pair),
        decode_milliseconds=milliseconds(costs.decode_sequence),
        decode_context_milliseconds=milliseconds(costs.decode_token),
        draft_milliseconds=milliseconds(_draft_seconds(fit, kind)),
        kv_cache_tokens=cache_tokens(fit),
        gpus=fit.question.num_ranks,
        gpu=kind.name,
    )


def _draft_seconds(fit: Fit, kind: GpuKind) -> float:
    """One guess for all sequences: the draft's weights, read whole on the one GPU that it is on."""
    question = fit.question
    if question.draft is None:
        return 0.0
    alone = replace(question, model=question.draft, draft=None, num_speculative_tokens=0, num_ranks=1)
    return step_costs(assess(alone), kind, CONCURRENCY).weights


def with_lever(model: StepModel, before: Fit, after: Fit, kind: GpuKind) -> StepModel:
    """A replica with a lever, from what it is without. Where that has no cache to multiply, as many tokens as
    the arithmetic gives."""
    old, new = (step_costs(fit, kind, CONCURRENCY) for fit in (before, after))
    known, tokens = cache_tokens(before), cache_tokens(after)

    def changed(name: str) -> float:
        return float(getattr(new, name) / getattr(old, name))

    return replace(
        model,
        base_milliseconds=model.base_milliseconds * changed("weights"),
        prefill_token_milliseconds=model.prefill_token_milliseconds * changed("prefill_token"),
        prefill_context_milliseconds=model.prefill_context_milliseconds * changed("prefill_pair"),
        decode_milliseconds=model.decode_milliseconds * changed("decode_sequence"),
        decode_context_milliseconds=model.decode_context_milliseconds * changed("decode_token"),
        kv_cache_tokens=round(model.kv_cache_tokens * tokens / known) if known else tokens,
        gpus=model.gpus * after.question.num_ranks // before.question.num_ranks,
    )


def cache_tokens(fit: Fit) -> int:
    """What the KV cache of a replica holds, all ranks together."""
    return fit.default_kv_bytes // fit.token_bytes
