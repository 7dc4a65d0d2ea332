"""What would make one replica fast enough where no live knob can: the model's own levers, with predictions.

A lever changes what reading the weights takes (the step model's base), what computing prompts takes, and what
reading the KV cache takes. So the fitted model with a lever's shares says what one request alone would see.
The shares of weights are over 16 bits, measured: on GPUs of one sequence on an H200 (docs/gpu.md; a prompt's
token is predicted there), on CPUs see docs/quantization.md. All are to be measured on the service's own model
before they are believed.
"""

from dataclasses import dataclass, replace
from typing import Literal

from headway_operator.samples import Limits
from headway_operator.slo.build import Build
from headway_operator.slo.capacity import Replica
from headway_operator.slo.step_fit import StepModel

Latency = Literal["ttft", "tpot"]

# Of a step's base, of a prompt token; the latter stay where weights become plain numbers before products.
GPU_WEIGHTS = {"none": (1.0, 1.0), "fp8": (0.66, 0.6), "int8": (0.66, 0.6), "int4": (0.54, 1.0)}
# bfloat16 is kept in 12 bits there.
CPU_WEIGHTS = {"none": (0.89, 1.0), "fp8": (0.64, 1.0), "int8": (0.63, 1.0), "int4": (0.46, 1.0)}
# What is offered, the more faithful first.
GPU_CHOICES, CPU_CHOICES = ("fp8", "int4"), ("int8", "int4")
# One byte a number and a scale for each token and head, of two bytes a number; what is computed stays. On a
# GPU its conversions take what its bytes leave.
GPU_KV_SHARE, CPU_KV_SHARE = 0.92, 0.6
# Half, and what two processes tell each other. Two on one CPU share its memory: nothing is won.
PARALLEL_SHARE = 0.55
MOST_PROCESSES = 64
# A lever that leaves more than this is not worth a word.
LEAST_WORTH = 0.95


@dataclass(frozen=True, slots=True)
class Lever:
    """words: the change. What it leaves, as shares: of a step's base, a prompt token, a sequence, an attended
    token."""

    words: str
    base: float = 1.0
    prefill: float = 1.0
    sequence: float = 1.0
    kv: float = 1.0

    def of(self, model: StepModel) -> StepModel:
        """The step model with this lever pulled."""
        return StepModel(
            self.base * model.base,
            self.prefill * model.prefill,
            self.sequence * model.sequence,
            self.kv * model.kv,
        )


def advice(
    build: Build, replica: Replica, limits: Limits, latency: Latency, target: float, factor: float = 1.0
) -> str:
    """What would bring the latency of a lone request down, with predictions, and whether it is enough.

    target: milliseconds. limits: those that the replica would have. factor: what is known over what the step
    model says of the replica as it is.
    """

    def predicted(*pulled: Lever) -> float:
        model = replica.model
        for lever in pulled:
            model = lever.of(model)
        found: float = getattr(replace(replica, model=model).idle(limits), latency)
        return factor * found

    now = predicted()
    groups = [
        worth
        for group in (_weights(build), _parallel(build), _kv(build))
        if (worth := [lever for lever in group if predicted(lever) <= LEAST_WORTH * now])
    ]
    if not groups:
        return "no lever of the model is known to help: it takes a smaller model or faster hardware"
    alone = [lever for group in groups for lever in group]
    times = [predicted(lever) for lever in alone]
    words = f"{' or '.join(lever.words for lever in alone)} would be predicted at {_list(times)} ms"
    if build.quantization == "auto" and any(lever.base < 1.0 and lever.sequence == 1.0 for lever in alone):
        words += " (if weights have 16 bits now)"
    if min(times) <= target:
        return words
    if len(groups) == 1:
        return f"{words}, which is not enough"
    together = [min(group, key=predicted) for group in groups]
    verdict = "is enough" if predicted(*together) <= target else "is not enough either"
    named = " and ".join(lever.words for lever in together)
    return f"{words}; {named} together, {_list([predicted(*together)])} ms, {verdict}"


def _weights(build: Build) -> list[Lever]:
    """None for what is said nowhere: how many bits the weights of other formats have."""
    shares = GPU_WEIGHTS if build.has_gpu else CPU_WEIGHTS
    is_assumed = build.quantization == "auto"
    today = shares.get("none" if is_assumed else build.quantization)
    if today is None:
        return []
    choices = GPU_CHOICES if build.has_gpu else CPU_CHOICES
    return [
        Lever(f"{name} weights", shares[name][0] / today[0], shares[name][1] / today[1])
        for name in choices
        if name != build.quantization
    ]


def _parallel(build: Build) -> list[Lever]:
    size = 2 * build.tensor_parallel_size
    if not build.has_gpu or size > MOST_PROCESSES:
        return []
    return [Lever(f"tensorParallelSize {size}", *(PARALLEL_SHARE,) * 4)]


def _kv(build: Build) -> list[Lever]:
    if build.kv_cache_dtype not in ("auto", "bfloat16"):
        return []
    return [Lever("kvCacheDtype fp8", kv=GPU_KV_SHARE if build.has_gpu else CPU_KV_SHARE)]


def _list(milliseconds: list[float]) -> str:
    return " / ".join(f"{one:.0f}" if one >= 10.0 else f"{one:.1f}" for one in milliseconds)
