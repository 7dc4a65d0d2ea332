"""One simulated engine: the runtime's scheduler, prefix cache, step loop and metrics over a model of time.

Lazy: between events nothing is computed. `wakes_at` says when something comes of it next; whoever touches it
earlier (a request, a sample, a new limit) has it catch up first. A turn of the loop that has begun is not
interrupted, as in the real engine, whose one thread answers between two turns: what comes meanwhile counts
from the turn's end.

Knows no pods and no gateway. TTFT is counted here, since no HTTP process stands before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway_runtime.batch import Batch, Sample, StepResult
from headway_runtime.config import Limits, Targets
from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.metrics import EngineMetrics, RejectReason
from headway_runtime.prompt_cost import PromptCost
from headway_runtime.request import Request, RequestOutput
from headway_runtime.scheduler import Scheduler
from headway_runtime.step_accounts import StepAccounts
from headway_runtime.step_loop import StepLoop
from headway_simulator.fast_forward import Plan, plan, take_over, tell
from headway_simulator.simulated_runner import SimulatedRunner, Speculation, Step
from headway_simulator.step_model import StepModel
from headway_simulator.unread_metrics import UnreadMetrics

BLOCK_SIZE = 16


def longest_sequence(model: StepModel) -> int:
    """Tokens that whole blocks of the KV cache hold."""
    return model.kv_cache_tokens // BLOCK_SIZE * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What is fixed at an engine's start; defaults are `headway serve`'s on a GPU.

    overlaps: a step is launched while the one before it runs. max_model_len: the longest prompt with answer.
    fast_forwards: uneventful steps are taken over at once; off only to prove that this changes nothing.
    targets: that are known from the start; a controller's come by PATCH. None: none.
    is_sampled: whether somebody reads its metrics; where not, those of single steps are left out
        (`UnreadMetrics`). It alters nothing that is simulated, and is no part of the settings' repr.
    """

    model: StepModel
    max_model_len: int
    limits: Limits
    block_size: int = BLOCK_SIZE
    long_prefill_share: float = 0.5
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    overlaps: bool = True
    speculation: Speculation | None = None
    fast_forwards: bool = True
    targets: Targets | None = None
    is_sampled: bool = field(default=True, repr=False)


@dataclass(frozen=True, slots=True)
class Emitted:
    """What became of requests when a turn ended.

    first: requests with the seconds from their receipt to their first byte. ended: with the seconds per
    output token after the first, None where there is only one.
    """

    first: list[tuple[str, float]]
    ended: list[tuple[str, float | None]]


class _Accounts(StepAccounts):
    """As the engine's; what it tells of a step's time is wrong by a factor."""

    step_time_error = 1.0

    def step(self, batch: Batch, result: StepResult, seconds: float) -> None:
        super().step(batch, result, self.step_time_error * seconds)


class SimulatedEngine:
    """now: when it starts. seed: of guesses. step_time_error: it tells of steps so many times as long as
    they are; as long is to be told of the time between tokens, which would put that right."""

    def __init__(self, settings: EngineSettings, now: float, seed: str, step_time_error: float = 1.0) -> None:
        self.settings = settings
        self.step_time_error = step_time_error
        speculation = settings.speculation
        num_guesses = 0 if speculation is None else speculation.num_speculative_tokens
        self._runner = SimulatedRunner(settings.model, now, speculation, seed)
        kind = EngineMetrics if settings.is_sampled else UnreadMetrics
        self.metrics = kind(clock=lambda: self._runner.now)
        self.scheduler = Scheduler(
            num_blocks=settings.model.kv_cache_tokens // settings.block_size,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            limits=replace(settings.limits, num_speculative_tokens=num_guesses),
            long_prefill_share=settings.long_prefill_share,
            prompt_cost=PromptCost(settings.model.doubling_context),
            enable_prefix_caching=settings.enable_prefix_caching,
            draft_policy=DraftPolicy(is_adaptive=speculation is None or speculation.is_adaptive),
        )
        policy = None if speculation is None else self.scheduler.draft_policy
        accounts = _Accounts(self.metrics, self.scheduler, policy)
        accounts.step_time_error = step_time_error
        self._loop: StepLoop[Step] = StepLoop(
            self.scheduler,
            self._runner,
            accounts,
            lambda: self._runner.now,
            offload=None,
            overlaps=settings.overlaps,
        )
        if settings.targets is not None:
            self.metrics.set_targets(settings.targets)
            self.scheduler.promptness.aim_at(settings.targets)
        self._received_at: dict[str, float] = {}
        self._num_output_tokens: dict[str, int] = {}
        self._outputs: list[RequestOutput] = []
        self._first_token_at: dict[str, float] = {}
        self._plan: Plan | None = None
        self._was_uneventful = False
        self.wakes_at = math.inf

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def live_requests(self) -> list[str]:
        """Those that have not ended."""
        return list(self._received_at)

    def oldest_waiting_seconds(self, now: float) -> float:
        """As `EngineCore` has it."""
        oldest = self.scheduler.oldest_unanswered_at()
        return 0.0 if oldest is None else max(0.0, now - oldest)

    def add(self, request: Request, answer_token: int, now: float, block_keys: Sequence[bytes] = ()) -> bool:
        """Take a request; False, and counted, where too many wait already.

        block_keys: of all blocks that it may come to fill, in place of hashes, which nobody computes then.
        """
        self.catch_up(now)
        self.metrics.received()
        scheduler = self.scheduler
        if scheduler.num_waiting >= self.settings.max_waiting:
            self.metrics.rejected(RejectReason.QUEUE_FULL)
            return False
        scheduler.add(request).block_keys += block_keys
        name = request.request_id
        self._received_at[name] = request.received_at
        self._num_output_tokens[name] = request.sampling.max_tokens
        self._runner.answers[name] = Sample(answer_token)
        if self.wakes_at == math.inf:
            self._runner.now = max(now, self._runner.now)
            self.wakes_at = self._runner.now
        return True

    def set_limits(self, limits: Limits, now: float) -> None:
        """New limits from the next turn on; guesses stay as they are."""
        self.catch_up(now)
        kept = self.scheduler.limits.num_speculative_tokens
        self.scheduler.limits = replace(limits, num_speculative_tokens=kept)
        self._was_uneventful = False

    def set_targets(self, targets: Targets, now: float) -> None:
        """Count against these from the next turn on."""
        self.catch_up(now)
        self.metrics.set_targets(targets)
        self.scheduler.promptness.aim_at(targets)

    def catch_up(self, now: float) -> None:
        """Do those planned turns that began before `now`; it then wakes at the end of the last of them."""
        ahead, self._plan = self._plan, None
        if ahead is None:
            return
        num_turns = ahead.turns_before(now)
        if self.settings.is_sampled:
            tell(ahead, num_turns, self.scheduler.prompt_cost, self.metrics, self.step_time_error)
        launched_at = take_over(ahead, num_turns, self.scheduler, self._runner, self.metrics)
        self._loop.skip_to(launched_at, self._runner.now)
        self.wakes_at = self._runner.now

    def wake(self) -> Emitted:
        """It is `wakes_at`: what the turn that ends now brought; begins the next one, or several."""
        self.catch_up(self.wakes_at)
        emitted = self._emit(self._runner.now)
        if self.settings.fast_forwards and self._was_uneventful:
            self._plan = plan(
                self.scheduler, self._runner, self.settings.model, is_under_way=self._loop.is_under_way
            )
            if self._plan is not None:
                self.wakes_at = self._plan.ends_at
                return emitted
        self._turn()
        return emitted

    def _turn(self) -> None:
        scheduler, runner = self.scheduler, self._runner
        now, before = runner.now, runner.latest
        done = self._loop.step(now)
        if done is None:
            self._was_uneventful, self.wakes_at = False, math.inf
            return
        self._outputs = done.outputs
        self.wakes_at = runner.now
        latest = runner.latest
        assert latest is not None
        self._was_uneventful = (
            latest is not before
            and done.num_preempted == 0
            and len(latest.batch.chunks) == scheduler.num_running
        )

    def _emit(self, now: float) -> Emitted:
        outputs, self._outputs = self._outputs, []
        first, ended = [], []
        delivery_seconds = 0.001 * self.settings.model.delivery_milliseconds
        for output in outputs:
            name = output.request_id
            if output.queue_seconds is not None:
                self._first_token_at[name] = now
                ttft_seconds = now + delivery_seconds - self._received_at[name]
                self.metrics.first_byte(ttft_seconds)
                first.append((name, ttft_seconds))
            if output.finish_reason is not None:
                first_at = self._first_token_at.pop(name)
                num_gaps = self._num_output_tokens.pop(name) - 1
                ended.append((name, (now - first_at) / num_gaps if num_gaps else None))
                del self._received_at[name], self._runner.answers[name]
        return Emitted(first, ended)
