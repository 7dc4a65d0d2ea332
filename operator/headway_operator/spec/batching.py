"""`spec.batching`: the ranges inside which the controller moves each replica's live batch limits."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import PositiveTokens, SpecModel, with_empty_default

STEP_RULE = "self.maxNumBatchedTokens.max >= self.maxNumSeqs.max"
STEP_MESSAGE = (
    "a step must have room for one token of each sequence: "
    "raise maxNumBatchedTokens.max or lower maxNumSeqs.max"
)
INITIAL_RULE = (
    "(has(self.maxNumBatchedTokens.initial) ? "
    "self.maxNumBatchedTokens.initial : self.maxNumBatchedTokens.max) >= "
    "(has(self.maxNumSeqs.initial) ? self.maxNumSeqs.initial : self.maxNumSeqs.max)"
)
INITIAL_MESSAGE = (
    "at start too a step must have room for one token of each sequence: "
    "raise maxNumBatchedTokens.initial or lower maxNumSeqs.initial"
)


def _range_rules(name: str) -> tuple[tuple[str, str], ...]:
    return (
        ("self.min <= self.max", f"min must not exceed max: lower {name}.min or raise {name}.max"),
        (
            "!has(self.initial) || (self.min <= self.initial && self.initial <= self.max)",
            f"initial must lie between min and max: change {name}.initial, or leave it out to start at max",
        ),
    )


class _LimitRange(SpecModel):
    def _check_order(self, name: str, low: int, high: int, initial: int | None) -> None:
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
    max: Annotated[int, Field(ge=1, le=4096)] = 64
    """Highest value, in sequences (1 to 4096); memory is set aside for it. Default 64."""
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
        initial_seqs, initial_tokens = self.initial
        pairs = (
            ("max", self.max_num_batched_tokens.max, self.max_num_seqs.max),
            ("initial", initial_tokens, initial_seqs),
        )
        for label, tokens, seqs in pairs:
            if tokens < seqs:
                raise ValueError(
                    f"maxNumBatchedTokens.{label} {tokens} is less than maxNumSeqs.{label} {seqs}: "
                    "a step must have room for one token of each sequence; "
                    f"raise maxNumBatchedTokens.{label} or lower maxNumSeqs.{label}"
                )
        return self

    @property
    def initial(self) -> tuple[int, int]:
        """Sequences and tokens at start, defaults applied."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return (
            seqs.max if seqs.initial is None else seqs.initial,
            tokens.max if tokens.initial is None else tokens.initial,
        )
