"""Requests as the engine takes them, made of lengths and hash ids: which tokens, so that prefixes are shared.

The content of a token matters to nobody but the prefix cache, which compares blocks. So all tokens of a
recorded block are one and the same number, that of its hash id; a request without hash ids, and each answer,
has a number of its own, which makes it like no other. A recorded prompt that goes on from an answer is
therefore never found further than that answer's prompt.

Nor does it matter what the prefix cache knows blocks by, as long as two have one key if, and only if, all
tokens up to their end are the same. So they are numbered, by the hash ids so far: hashes would take a quarter
of the time of a simulation of long prompts.
"""

from functools import cache

from headway_runtime.request import Request, SamplingParams
from headway_simulator.trace import Arrival


class Prompts:
    """Hands out the numbers of one simulation."""

    def __init__(self) -> None:
        self._num_used = 0
        self._number_of: dict[tuple[int, int, int], int] = {}
        # What stands for all tokens up to the end of a recorded block: of what comes before, and its number.
        self._chain_of: dict[tuple[int, int], int] = {}
        self._num_chains = 0

    def request(self, name: str, arrival: Arrival, received_at: float) -> Request:
        """A request that generates exactly the answer's length."""
        return Request(
            name,
            tuple(self._tokens(arrival)),
            SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens),
            received_at,
        )

    def block_keys(self, arrival: Arrival, block_size: int) -> list[bytes]:
        """Of all blocks that a request with its answer may fill, in order: of those whose tokens are
        recorded, and of the others, which are like no other's."""
        num_blocks = (arrival.prompt_tokens + arrival.output_tokens) // block_size
        indices = _indices(max(64, 1 << num_blocks.bit_length()))
        keys: list[bytes] = []
        chain, end = 0, 0
        for hash_id in arrival.hash_ids:
            end = min(arrival.prompt_tokens, end + arrival.hash_block_tokens)
            before = chain, self._number(arrival, hash_id)
            found = self._chain_of.get(before)
            chain = self._chain_of[before] = self._new_chain() if found is None else found
            begin = chain.to_bytes(8, "little")
            keys += [begin + index for index in indices[len(keys) : end // block_size]]
        begin = self._new_chain().to_bytes(8, "little")
        return keys + [begin + index for index in indices[len(keys) : num_blocks]]

    def _new_chain(self) -> int:
        self._num_chains += 1
        return self._num_chains

    def answer_token(self) -> int:
        """A token like no other."""
        self._num_used += 1
        return self._num_used

    def _tokens(self, arrival: Arrival) -> list[int]:
        tokens: list[int] = []
        for hash_id in arrival.hash_ids:
            count = min(arrival.prompt_tokens - len(tokens), arrival.hash_block_tokens)
            tokens += [self._number(arrival, hash_id)] * count
        tokens += [self.answer_token()] * (arrival.prompt_tokens - len(tokens))
        return tokens

    def _number(self, arrival: Arrival, hash_id: int) -> int:
        key = (arrival.user_space, arrival.hash_block_tokens, hash_id)
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = self.answer_token()
        return number


@cache
def _indices(count: int) -> list[bytes]:
    return [index.to_bytes(4, "little") for index in range(count)]
