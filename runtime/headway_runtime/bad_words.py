"""Words that an answer must not hold, as sequences of tokens whose last one must not follow the others.

A word is encoded as it stands and with a space before it, as it comes within a text. vLLM
(`SamplingParams.update_from_tokenizer`) leaves the second form out where it has another number of tokens, so
that a word with a token of its own within texts comes all the same; here it counts. Only tokens of the answer
count, and only these sequences: a word that the model spells by other tokens is not seen.
"""

from collections.abc import Callable, Collection, Sequence

from headway_runtime.batch import Chunk
from headway_runtime.errors import InvalidRequestError

Encode = Callable[[str], Sequence[int]]


def bad_word_tokens(words: Collection[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """The forbidden sequences, each once. encode: without special tokens.

    InvalidRequestError for a word that comes to no token.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(encode(word.lstrip()))
        if not bare:
            raise InvalidRequestError(
                f"bad_words holds {word!r}, which comes to no token; leave it out", param="bad_words"
            )
        spaced = tuple(encode(f" {word.lstrip()}"))
        found.append(bare)
        # A space alone and then the bare word is forbidden with the bare word.
        if spaced[-len(bare) :] != bare:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


class BadWords:
    """Which tokens would complete a forbidden word of one request, found by the token before the last."""

    def __init__(self, words: Collection[tuple[int, ...]]) -> None:
        self._by_last_known: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_last_known.setdefault(word[-2], []).append(word)
        self._longest = max(map(len, words))

    def completing(self, chunk: Chunk) -> list[int]:
        """Last tokens of those words of several tokens whose others the answer now ends with."""
        count = min(self._longest - 1, chunk.num_generated)
        if not self._by_last_known or count == 0:
            return []
        tail = (*chunk.token_ids[-count:], *chunk.ahead)[-count:]
        words = self._by_last_known.get(tail[-1], ())
        return [word[-1] for word in words if tail[1 - len(word) :] == word[:-1]]


def always_forbidden(words: Collection[tuple[int, ...]]) -> list[int]:
    """The words of one token."""
    return [word[0] for word in words if len(word) == 1]
