"""The logits that an engine has after each token of given text: the served model, without requests.

Owns a runner and the only sequence in its cache. The text goes through the KV cache in chunks, as a prompt
does, so that weights, KV types and kernels are those that serve; nothing is sampled, scheduled or guessed.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.request import SamplingParams
from headway_runtime.runner import Runner


class TeacherForcing:
    """One model, loaded. ConfigError or ModelLoadError while starting."""

    def __init__(self, config: EngineConfig, chunk_tokens: int) -> None:
        """chunk_tokens: computed at once. Of the KV cache only one sequence's worth is taken."""
        self._chunk_tokens = chunk_tokens
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._runner = Runner(
            replace(
                config,
                envelope=Envelope(1, chunk_tokens),
                limits=Limits(1, chunk_tokens),
                kv_cache_memory_bytes=None,
                speculative=None,
                offload=None,
                enforce_eager=True,
            )
        )

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def close(self) -> None:
        """End the other processes that share the model, if there are any."""
        self._runner.close()

    def logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Logits [tokens of a chunk, vocab_size], chunk by chunk; at most max_model_len tokens.

        Each holds until the next one is asked for. Only one such iterator may be at work.
        """
        assert 0 < len(token_ids) <= self._max_model_len, len(token_ids)
        known = list(token_ids)
        table = array("q", range(1, -(-len(known) // self._block_size) + 1))
        # What the last sequence left may be NaN, which no mask hides.
        self._runner.clear_blocks(table)
        for start in range(0, len(known), self._chunk_tokens):
            count = min(self._chunk_tokens, len(known) - start)
            chunk = Chunk("text", known, start, count, table, 0, samples=False, sampling=SamplingParams())
            yield self._runner.all_logits(Batch((chunk,), int(count == 1), count))
