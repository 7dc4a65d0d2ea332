"""How long a step takes, and what a replica has: the numbers that stand for a model on a GPU.

    seconds = base + prefill_token * P + prefill_context * Q + decode * D + decode_context * K

P: prompt tokens computed. Q: pairs of a prompt token and one that it attends to, itself included. D: rows of
sequences that decode, a row for each guess, too. K: tokens that these sequences attend to. Coefficients are
milliseconds, and at least 0, so that no step is ever negative or gets shorter by more work.

Profiles. `llama-3.1-8b-a100-tp2`: published steps of vLLM on two A100: decode 8.3 + 0.25 b ms for b
sequences; prompts of 1k / 2k / 4k / 8k tokens in 54 / 131 / 234 / 542 ms. With the base given by decode, the
two prefill coefficients are the least squares of relative errors over those four; they are met within 14%.
Decode's published slope holds its context's cost, so `decode_context` is 0. KV: 2 * 80 GB * 0.9 less 16 GB
of weights and 8 GB of activations, at 128 KiB a token.

`llama-2-70b-h100-tp8`: decode of 30.5 ms at one sequence and 50.0 ms at 64, published. Its prefill was not:
0.035 ms a token is 2 * 70e9 operations over half of 8 * 989 TFLOP/s, an estimate. KV: 8 * 80 GB * 0.9 less
140 GB of weights and 16 GB of activations, at 320 KiB a token.

One's own: a JSON file with the fields of `StepModel`.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headway_simulator.errors import OptionsError


@dataclass(frozen=True, slots=True)
class StepModel:
    """One replica's speed and size.

    draft_milliseconds: one guess of a draft model for all sequences of a step; 0 for n-grams.
    delivery_milliseconds: from a token computed to its byte written, which TTFT holds once.
    kv_cache_tokens: what its KV cache holds. gpus: per replica, for GPU-hours. gpu: their kind, as `headway
    plan` names it; "" where it is not known.
    """

    name: str
    base_milliseconds: float
    prefill_token_milliseconds: float
    decode_milliseconds: float
    kv_cache_tokens: int
    prefill_context_milliseconds: float = 0.0
    decode_context_milliseconds: float = 0.0
    draft_milliseconds: float = 0.0
    delivery_milliseconds: float = 0.0
    gpus: int = 1
    gpu: str = ""

    @property
    def doubling_context(self) -> int:
        """As `headway_runtime.prompt_cost` has it: tokens that one attends to which takes as long as two."""
        if not self.prefill_context_milliseconds:
            return 0
        return max(1, round(self.prefill_token_milliseconds / self.prefill_context_milliseconds))

    def seconds(
        self, num_prefill_tokens: int, prefill_context: int, num_decodes: int, decode_context: int
    ) -> float:
        """Of one step; see the header."""
        return 0.001 * (
            self.base_milliseconds
            + self.prefill_token_milliseconds * num_prefill_tokens
            + self.prefill_context_milliseconds * prefill_context
            + self.decode_milliseconds * num_decodes
            + self.decode_context_milliseconds * decode_context
        )


def idle_ttft_milliseconds(model: StepModel, num_prompt_tokens: int, max_num_batched_tokens: int) -> float:
    """Of a prompt that comes alone, in chunks of so many tokens."""
    seconds, done = 0.0, 0
    while done < num_prompt_tokens:
        chunk = min(max_num_batched_tokens, num_prompt_tokens - done)
        seconds += model.seconds(chunk, chunk * done + chunk * (chunk + 1) // 2, 0, 0)
        done += chunk
    return 1000 * seconds + model.delivery_milliseconds


def idle_tpot_milliseconds(model: StepModel, num_context_tokens: int) -> float:
    """Of a sequence that decodes alone."""
    return 1000 * model.seconds(0, 0, 1, num_context_tokens)


def slower(model: StepModel, factor: float) -> StepModel:
    """The same replica with steps of so many times the length."""
    times = ("base", "prefill_token", "prefill_context", "decode", "decode_context", "draft")
    return replace(
        model, **{f"{name}_milliseconds": factor * getattr(model, f"{name}_milliseconds") for name in times}
    )


PROFILES = {
    one.name: one
    for one in (
        StepModel(
            name="llama-3.1-8b-a100-tp2",
            base_milliseconds=8.3,
            prefill_token_milliseconds=0.0466,
            prefill_context_milliseconds=4.68e-6,
            decode_milliseconds=0.25,
            kv_cache_tokens=900_000,
            gpus=2,
            gpu="a100-80g",
        ),
        StepModel(
            name="llama-2-70b-h100-tp8",
            base_milliseconds=30.19,
            prefill_token_milliseconds=0.035,
            decode_milliseconds=0.3095,
            kv_cache_tokens=1_280_000,
            gpus=8,
            gpu="h100-80g",
        ),
    )
}
DEFAULT_PROFILE = "llama-3.1-8b-a100-tp2"
MOST_MILLISECONDS = 600_000
_MOST = {"kv_cache_tokens": 100_000_000, "gpus": 10_000}
_REQUIRED = (
    "name",
    "base_milliseconds",
    "prefill_token_milliseconds",
    "decode_milliseconds",
    "kv_cache_tokens",
)


def read_step_model(name_or_path: str) -> StepModel:
    """A profile by its name, or the one in a JSON file. Raises OptionsError, naming the field."""
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise OptionsError(
            f"step model {name_or_path!r} is neither a file nor one of {', '.join(sorted(PROFILES))}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionsError(f"step model {name_or_path!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise OptionsError(f"step model {name_or_path!r} is no JSON object; write one")
    known = {one.name for one in fields(StepModel)}
    for field in _REQUIRED:
        if field not in data:
            raise OptionsError(f"step model {name_or_path!r}: {field} is missing; write it")
    for field, value in data.items():
        if field not in known:
            raise OptionsError(f"step model {name_or_path!r}: {field} is unknown; remove it")
        _check(name_or_path, field, value)
    return StepModel(**data)


def _check(where: str, field: str, value: object) -> None:
    if field in ("name", "gpu"):
        if not isinstance(value, str):
            raise OptionsError(f"step model {where!r}: {field}={value!r} is no text")
        return
    is_count = field in ("kv_cache_tokens", "gpus")
    kinds = int if is_count else int | float
    # A step that takes no time would never end.
    least = 1 if is_count else 1e-6 if field == "base_milliseconds" else 0
    most = _MOST.get(field, MOST_MILLISECONDS)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        raise OptionsError(
            f"step model {where!r}: {field}={value!r:.40} is no {'whole ' if is_count else ''}number "
            f"from {least:g} to {most:g}; correct it"
        )
