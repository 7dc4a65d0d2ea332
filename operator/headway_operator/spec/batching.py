"""`spec.batching`: the ranges inside which the controller moves each replica's live batch limits."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import PositiveTokens, SpecModel, with_empty_default

# Of sequences, where nothing says how many; as `headway serve` has it. A GPU gives three times the tokens a
# second with 256 that it gives with 32 (docs/gpu.md, Llama-3.1-8B); a CPU is at its most long before 64.
GPU_NUM_SEQS, CPU_NUM_SEQS = 256, 64
STEP_RULE = (
    "self.maxNumBatchedTokens.max >= (has(self.maxNumSeqs.max) ? self.maxNumSeqs.max : self.maxNumSeqs.min)"
)
STEP_MESSAGE = (
    "a step must have room for one token of each sequence: "
    "raise maxNumBatchedTokens.max or lower maxNumSeqs.max (without it: min)"
)
INITIAL_RULE = (
    "(has(self.maxNumBatchedTokens.initial) ? "
    "self.maxNumBatchedTokens.initial : self.maxNumBatchedTokens.max) >= "
    "(has(self.maxNumSeqs.initial) ? self.maxNumSeqs.initial : "
    "has(self.maxNumSeqs.max) ? self.maxNumSeqs.max : self.maxNumSeqs.min)"
)
INITIAL_MESSAGE = (
    "at start too a step must have room for one token of each sequence: "
    "raise maxNumBatchedTokens.initial or lower maxNumSeqs.initial (without it: max, or min)"
)


def _range_rules(name: str) -> tuple[tuple[str, str], ...]:
    within = "self.min <= self.initial && (!has(self.max) || self.initial <= self.max)"
    return (
        (
            "!has(self.max) || self.min <= self.max",
            f"min must not exceed max: lower {name}.min or raise {name}.max",
        ),
        (
            f"!has(self.initial) || ({within})",
            f"initial must lie between min and max: change {name}.initial, or leave it out to start at max",
        ),
    )


class _LimitRange(SpecModel):
    def _check_order(self, name: str, low: int, high: int | None, initial: int | None) -> None:
        if high is None:
            high = max(low, initial or 1)
        if low > high:
            raise ValueError(f"min {low} must not exceed max {high}: lower {name}.min or raise {name}.max")
        if initial is not None and not low <= initial <= high:
            raise ValueError(
                f"initial {initial} must lie between min {low} and max {high}: change {name}.initial, "
                "or leave it out to start at max"
            )


class MaxNumSeqs(_LimitRange):
    """Range of the live limit on sequences that run at once in one replica."""

    model_config = ConfigDict(json_schema_extra=with_empty_default(*_range_rules("maxNumSeqs")))
    min: Annotated[int, Field(ge=1, le=4096)] = 1
    """Lowest value, in sequences (1 to 4096). Default 1."""
    max: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Highest value, in sequences (1 to 4096); memory is set aside for it. Default: 256 on GPUs and 64 on
    CPUs, or as many as the token budget has room for, but no fewer than min and initial."""
    initial: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Value at start, in sequences (1 to 4096), between min and max. Default: max."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        self._check_order("maxNumSeqs", self.min, self.max, self.initial)
        return self


class MaxNumBatchedTokens(_LimitRange):
    """Range of the live limit on tokens, prompt and generated, that one step computes."""

    model_config = ConfigDict(json_schema_extra=with_empty_default(*_range_rules("maxNumBatchedTokens")))
    min: PositiveTokens = 16
    """Lowest value, in tokens (1 to 1048576). Default 16."""
    max: PositiveTokens = 2048
    """Highest value, in tokens (1 to 1048576); memory is set aside for it. Default 2048."""
    initial: PositiveTokens | None = None
    """Value at start, in tokens (1 to 1048576), between min and max. Default: max."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        self._check_order("maxNumBatchedTokens", self.min, self.max, self.initial)
        return self


class Batching(SpecModel):
    """The envelope inside which the controller moves each replica's live batch limits."""

    model_config = ConfigDict(
        json_schema_extra=with_empty_default((STEP_RULE, STEP_MESSAGE), (INITIAL_RULE, INITIAL_MESSAGE))
    )
    max_num_seqs: MaxNumSeqs = MaxNumSeqs()
    """Sequences that run at once in one replica. Default: those of its fields."""
    max_num_batched_tokens: MaxNumBatchedTokens = MaxNumBatchedTokens()
    """Tokens that one step of a replica computes; beside decodes a prompt's count the more the more they
    attend to. Default: those of its fields."""

    @model_validator(mode="after")
    def _tokens_cover_sequences(self) -> Self:
        # What is not said is made to fit.
        seqs = self.max_num_seqs
        end = ("min", seqs.min) if seqs.max is None else ("max", seqs.max)
        first = end if seqs.initial is None else ("initial", seqs.initial)
        pairs = (
            ("max", self.max_num_batched_tokens.max, *end),
            ("initial", self.initial_tokens, *first),
        )
        for label, tokens, field, number in pairs:
            if tokens < number:
                raise ValueError(
                    f"maxNumBatchedTokens.{label} {tokens} is less than maxNumSeqs.{field} {number}: "
                    "a step must have room for one token of each sequence; "
                    f"raise maxNumBatchedTokens.{label} or lower maxNumSeqs.{field}"
                )
        return self

    @property
    def initial_tokens(self) -> int:
        """The token budget at start, defaults applied."""
        tokens = self.max_num_batched_tokens
        return tokens.max if tokens.initial is None else tokens.initial

    def most_seqs(self, *, has_gpu: bool) -> int:
        """The upper end of the limit on sequences, defaults applied."""
        seqs = self.max_num_seqs
        if seqs.max is not None:
            return seqs.max
        default = min(GPU_NUM_SEQS if has_gpu else CPU_NUM_SEQS, self.initial_tokens)
        return max(seqs.min, seqs.initial or 1, default)
