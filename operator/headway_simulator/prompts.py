"""Requests as the engine takes them, made of lengths and hash ids: which tokens, so that prefixes are shared.

The content of a token matters to nobody but the prefix cache, which compares blocks. So all tokens of a
recorded block are one and the same number, that of its hash id; a request without hash ids, and each answer,
has a number of its own, which makes it like no other. A recorded prompt that goes on from an answer is
therefore never found further than that answer's prompt.
"""

from headway_runtime.request import Request, SamplingParams
from headway_simulator.trace import Arrival


class Prompts:
    """Hands out the numbers of one simulation."""

    def __init__(self) -> None:
        self._num_used = 0
        self._number_of: dict[tuple[int, int, int], int] = {}

    def request(self, name: str, arrival: Arrival, received_at: float) -> Request:
        """A request that generates exactly the answer's length."""
        return Request(
            name,
            tuple(self._tokens(arrival)),
            SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens),
            received_at,
        )

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
