"""The metrics of a replica that nobody samples: what each step would add to them is left out, but for counts
of tokens. What a request adds, when it begins and ends, is kept."""

from collections.abc import Callable

from headway_runtime.metrics import EngineMetrics
from headway_runtime.step_moments import StepMoments


class UnreadMetrics(EngineMetrics):
    """Without times and sizes of steps, gaps between tokens, rates and moments of steps. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.moments = _NoMoments()

    def tokens(self, prompt_computed: int = 0, cached: int = 0, generated: int = 0) -> None:
        """As counters; rates stay 0."""
        self._prompt_tokens += prompt_computed
        self._cached_tokens += cached
        self._generated_tokens += generated

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """Left out."""

    def step(
        self,
        seconds: float,
        num_prefill_tokens: int,
        num_decode_seqs: int,
        num_prefill_seqs: int = 0,
        *,
        is_recorded: bool = False,
    ) -> None:
        """Left out."""


class _NoMoments(StepMoments):
    __slots__ = ()

    def step(self, milliseconds: float, prompt_cost: int, num_decodes: int, num_kv_tokens: int) -> None:
        """Left out."""
