"""Which tokens rows may choose from, by their grammar, `allowed_token_ids`, `bad_words` and `min_tokens`.

A row must match its grammar, stay within `allowed_token_ids` and complete no word of `bad_words`; a row to
which these leave nothing has no token. Stop tokens before `min_tokens`, and end-of-sequence tokens in a
request that ignores them, are forbidden less strictly: not where they are all that is left.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime.bad_words import BadWords, always_forbidden
from headway_runtime.batch import Chunk
from headway_runtime.grammar_matcher import TokenMatcher
from headway_runtime.request import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor

Words = NDArray[numpy.int32]
BITS_OF_WORD = 32

# So many grammars at once are worth waking other threads for.
LEAST_PARALLEL_GRAMMARS = 4


@dataclass(frozen=True, slots=True)
class Unsatisfiable:
    """Why a row can have no token, and the request's field at fault."""

    error: str
    param: str


def is_masked(sampling: SamplingParams) -> bool:
    """Whether a request chooses from some tokens only."""
    return sampling.grammar is not None or sampling.allowed_token_ids is not None or bool(sampling.bad_words)


def forbids_stops(chunk: Chunk) -> bool:
    """Whether the stop tokens are forbidden now."""
    return chunk.num_generated < chunk.sampling.min_tokens and bool(chunk.sampling.stop_token_ids)


def flat_places(tokens: Sequence[Iterable[int]], vocab_size: int, device: torch.device) -> Tensor | None:
    """Places of each row's tokens in a flat tensor of rows; None if there is none."""
    places = [
        row * vocab_size + token for row, own in enumerate(tokens) for token in own if token < vocab_size
    ]
    return torch.tensor(places, device=device) if places else None


class TokenMasks:
    """The masks of some rows of a batch, the same in every step but for what the grammars say.

    rows: the rows among `chunks` that are masked; at least one.
    """

    def __init__(
        self, chunks: Sequence[Chunk], rows: list[int], vocab_size: int, device: torch.device
    ) -> None:
        self._rows = rows
        self._is_all = len(rows) == len(chunks)
        self._vocab_size = vocab_size
        self._device = device
        masked = [chunks[row] for row in rows]
        self._with_grammar = [index for index, one in enumerate(masked) if one.sampling.grammar is not None]
        self._grammars = _GrammarMasks(vocab_size, device) if self._with_grammar else None
        self._listed = self._plan_listed([one.sampling for one in masked])
        self._words = [
            (index, BadWords(one.sampling.bad_words))
            for index, one in enumerate(masked)
            if one.sampling.bad_words
        ]
        unwanted = [_unwanted(one) for one in masked]
        self._reluctant = [index for index, tokens in enumerate(unwanted) if tokens]
        self._unwanted_tokens = [unwanted[index] for index in self._reluctant]
        self._unwanted = flat_places(self._unwanted_tokens, vocab_size, device)
        self._listed_bits: Words | None = None

    def apply(self, logits: Tensor, chunks: Sequence[Chunk]) -> dict[int, Unsatisfiable]:
        """Make forbidden tokens -inf in float32 logits [rows, vocab_size]; says which rows have none left."""
        masked = [chunks[row] for row in self._rows]
        matchers = [masked[index].matcher for index in self._with_grammar]
        allowed = self._allow([one for one in matchers if one is not None])
        if completing := self._completing(masked):
            places, tokens = zip(*completing, strict=True)
            allowed[list(places), list(tokens)] = False
        has_any = allowed.any(dim=-1).tolist()
        if self._unwanted is not None:
            self._forbid_unwanted(allowed)
        forbidden = allowed.logical_not_()
        if self._is_all:
            logits.masked_fill_(forbidden, -math.inf)
        else:
            rows = torch.tensor(self._rows, device=self._device)
            logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)
        return self._problems(masked, has_any)

    def bits(self, chunks: Sequence[Chunk]) -> tuple[Words, dict[int, Unsatisfiable]]:
        """What the masked rows may choose from, without a tensor: bits, lowest first in words of 32, [masked
        rows, words]; and which rows have nothing left. For masks whose device is the CPU."""
        masked = [chunks[row] for row in self._rows]
        matchers = [one for index in self._with_grammar if (one := masked[index].matcher) is not None]
        allowed = self._allowed_bits(matchers)
        for index, token in self._completing(masked):
            _forbid(allowed[index], token)
        has_any = [bool(own.any()) for own in allowed]
        for index, tokens in zip(self._reluctant, self._unwanted_tokens, strict=True):
            own = allowed[index].copy()
            for token in tokens:
                if token < self._vocab_size:
                    _forbid(own, token)
            if own.any():
                allowed[index] = own
        return allowed, self._problems(masked, has_any)

    def _completing(self, masked: list[Chunk]) -> list[tuple[int, int]]:
        """Masked rows and tokens that would complete a bad word of theirs."""
        return [
            (index, token)
            for index, words in self._words
            for token in words.completing(masked[index])
            if token < self._vocab_size
        ]

    def _allowed_bits(self, matchers: list[TokenMatcher]) -> Words:
        assert len(matchers) == len(self._with_grammar), "a grammar without a matcher"
        if self._listed is not None and self._listed_bits is None:
            self._listed_bits = _packed(self._listed.numpy())
        if self._grammars is None:
            assert self._listed_bits is not None
            return self._listed_bits.copy()
        by_grammar: Words = self._grammars.packed(matchers).numpy().view(numpy.int32)
        if beyond := self._vocab_size % BITS_OF_WORD:
            by_grammar[:, -1] &= (1 << beyond) - 1
        if self._listed_bits is None:
            return by_grammar
        allowed = self._listed_bits.copy()
        allowed[self._with_grammar] &= by_grammar
        return allowed

    def _problems(self, masked: list[Chunk], has_any: list[bool]) -> dict[int, Unsatisfiable]:
        problems = (
            (row, _problem(chunk, has_token))
            for row, chunk, has_token in zip(self._rows, masked, has_any, strict=True)
        )
        return {row: problem for row, problem in problems if problem is not None}

    def _allow(self, matchers: list[TokenMatcher]) -> Tensor:
        """What the masked rows may choose from: booleans [masked rows, vocab_size], to be overwritten."""
        assert len(matchers) == len(self._with_grammar), "a grammar without a matcher"
        if self._grammars is None:
            assert self._listed is not None
            return self._listed.clone()
        by_grammar = self._grammars(matchers)
        if self._listed is None:
            return by_grammar
        allowed = self._listed.clone()
        allowed[self._with_grammar] &= by_grammar
        return allowed

    def _forbid_unwanted(self, allowed: Tensor) -> None:
        assert self._unwanted is not None
        before = allowed[self._reluctant]
        after = before.clone()
        after.view(-1).index_fill_(0, self._unwanted, False)
        allowed[self._reluctant] = torch.where(after.any(dim=-1, keepdim=True), after, before)

    def _plan_listed(self, params: list[SamplingParams]) -> Tensor | None:
        """allowed_token_ids of the masked rows, without bad words of one token, as booleans; None if no row
        has any."""
        if all(one.allowed_token_ids is None and not one.bad_words for one in params):
            return None
        listed = torch.zeros((len(params), self._vocab_size), dtype=torch.bool, device=self._device)
        for row, one in enumerate(params):
            if one.allowed_token_ids is None:
                listed[row] = True
            else:
                listed[row, [token for token in one.allowed_token_ids if token < self._vocab_size]] = True
            listed[row, [token for token in always_forbidden(one.bad_words) if token < self._vocab_size]] = (
                False
            )
        return listed


class _GrammarMasks:
    """What grammars allow next, as the library's bits turned into booleans."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
        self._executor: LLExecutor | None = None

    def __call__(self, matchers: list[TokenMatcher]) -> Tensor:
        """Booleans [matchers, vocab_size]."""
        packed = self.packed(matchers)
        bits = (packed.to(self._device).unsqueeze(2) & self._bits) != 0
        return bits.view(len(matchers), -1)[:, : self._vocab_size].contiguous()

    def packed(self, matchers: list[TokenMatcher]) -> Tensor:
        """The same as bits, with some of no token behind: uint8 [matchers, bytes of whole words], on the
        CPU."""
        # The library writes whole words of 32 bits.
        row_bytes = -(-self._vocab_size // 32) * 4
        packed = torch.empty((len(matchers), row_bytes), dtype=torch.uint8)
        pointer = packed.data_ptr()
        if len(matchers) < LEAST_PARALLEL_GRAMMARS:
            for row, one in enumerate(matchers):
                one.library_matcher.unsafe_compute_mask_ptr(pointer + row * row_bytes, row_bytes)
        else:
            pairs = [(one.library_matcher, row) for row, one in enumerate(matchers)]
            self._parallel().unsafe_compute_mask_ptr(pairs, pointer, row_bytes, len(matchers))
        return packed

    def _parallel(self) -> "LLExecutor":
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=torch.get_num_threads())
        return self._executor


def _forbid(bits: Words, token: int) -> None:
    """Clear a token's bit among those of one row."""
    bits.view(numpy.uint8)[token // 8] &= 0xFF ^ (1 << token % 8)


def _packed(allowed: NDArray[numpy.bool_]) -> Words:
    """Booleans [rows, tokens] as bits, lowest first, in whole words."""
    missing = -allowed.shape[1] % BITS_OF_WORD
    whole = numpy.pad(allowed, ((0, 0), (0, missing)))
    return numpy.packbits(whole, axis=1, bitorder="little").view(numpy.int32)


def _unwanted(chunk: Chunk) -> frozenset[int]:
    """Tokens that are chosen only where nothing else is allowed."""
    unwanted = frozenset() if chunk.matcher is None else chunk.matcher.unwanted_ids
    return unwanted | chunk.sampling.stop_token_ids if forbids_stops(chunk) else unwanted


def _problem(chunk: Chunk, has_token: bool) -> Unsatisfiable | None:  # noqa: FBT001
    if chunk.matcher is not None and (error := chunk.matcher.error) is not None:
        return Unsatisfiable(error, chunk.matcher.param)
    if has_token:
        return None
    also = " and the grammar" if chunk.matcher is not None else ""
    if chunk.sampling.bad_words:
        param, also = "bad_words", f", allowed_token_ids{also}" if also else " and allowed_token_ids"
        return Unsatisfiable(f"bad_words{also} leave no token to choose from; forbid fewer", param)
    return Unsatisfiable(
        f"allowed_token_ids{also} leave no token to choose from; allow more", "allowed_token_ids"
    )
