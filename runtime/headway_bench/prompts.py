"""Makes prompts of an exact number of tokens; sends nothing and chooses no lengths.

A prompt is drawn as a row of numbers and then written down in one of two ways. As text: each number stands
for a word that is one token, and a row of such words is as many tokens as it has words; that is checked, not
assumed (`Words.check`). As token ids: each number stands for an id. So prompts can share a beginning, be cut
and be joined as rows, and stay exact.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy
from numpy.typing import NDArray

from headway_bench.errors import TargetError

Row = NDArray[numpy.int64]
Prompt = str | list[int]
LengthSource = Literal["tokenizer", "server", "ids", "words"]
CountTokens = Callable[[str], int]

_WORD = re.compile(r"[A-Za-z]+")
_FEWEST_WORDS = 16
_CHECKED_LENGTHS = (1, 2, 17, 64, 301)
# Short, common words: every vocabulary of a natural language has most of them as one token.
_COMMON_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had "
    "an they which one you were all her she there would their we him been has when who will no more if "
    "out so up said what its about than into them can only other time new some could these two may first "
    "then do any like my now over such our man me even most made after also did many must before back see "
    "through way where get much go well your know should down work year because come people just say each "
    "those take day good how long little use own men here life both between old under last never place "
    "same another think house while high right water"
)
COMMON_WORDS = _COMMON_WORDS.split()


class Writer(Protocol):
    """How rows become prompts. `size` is how many numbers there are to draw from."""

    @property
    def size(self) -> int: ...

    @property
    def length_source(self) -> LengthSource:
        """What makes the lengths right, for the report."""

    def num_symbols(self, num_tokens: int) -> int:
        """How long a row must be to make so many tokens."""

    def write(self, row: Row) -> Prompt:
        """The prompt that the row stands for."""


@dataclass(frozen=True, slots=True)
class Words:
    """`openers` begin a text, `followers` (with a space in front) go on; each is one token in its place."""

    openers: tuple[str, ...]
    followers: tuple[str, ...]
    length_source: LengthSource
    tokens_per_word: float = 1.0

    @property
    def size(self) -> int:
        return len(self.followers)

    def num_symbols(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self.tokens_per_word))

    def write(self, row: Row) -> str:
        numbers: list[int] = row.tolist()
        first, rest = numbers[0], numbers[1:]
        followers = self.followers
        return self.openers[first % len(self.openers)] + "".join([followers[number] for number in rest])

    def check(self, count: CountTokens, random: numpy.random.Generator) -> None:
        """Raise TargetError unless rows of several lengths come out as long as they should."""
        for length in _CHECKED_LENGTHS:
            text = self.write(random.integers(self.size, size=length))
            if (counted := count(text)) != length:
                raise TargetError(
                    f"a text of {length} words that are one token each is {counted} tokens together: this "
                    "tokenizer joins words; use --prompt-lengths=ids with completions, or =words"
                )


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Each number stands for one of `ids`."""

    ids: tuple[int, ...]
    length_source: LengthSource = "ids"

    @property
    def size(self) -> int:
        return len(self.ids)

    def num_symbols(self, num_tokens: int) -> int:
        return num_tokens

    def write(self, row: Row) -> list[int]:
        ids = self.ids
        return [ids[number] for number in row.tolist()]


def words_of_one_token(
    candidates: Sequence[str], count: CountTokens, length_source: LengthSource
) -> Words | None:
    """Those of `candidates` (bare words) that are one token; None when there are too few of them.

    `count` must not count what a server adds to every text.
    """
    openers = tuple(word for word in candidates if count(word) == 1)
    if not openers:
        return None
    alone = openers[0]
    followers = tuple(f" {word}" for word in candidates if count(f"{alone} {word}") == 2)
    return Words(openers, followers, length_source) if len(followers) >= _FEWEST_WORDS else None


def candidates_of(vocabulary: Sequence[str]) -> list[str]:
    """The distinct bare words of two letters and more among a vocabulary's decoded tokens."""
    bare = {token.strip() for token in vocabulary}
    return sorted(word for word in bare if len(word) > 1 and _WORD.fullmatch(word))


def draw_row(size: int, length: int, seed: Sequence[int]) -> Row:
    """A row that depends on nothing but the numbers in `seed`."""
    return numpy.random.default_rng(list(seed)).integers(size, size=length)
