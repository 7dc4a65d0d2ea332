"""`headway serve` with an engine that computes nothing and emits tokens as fast as asked.

    python -m benchmarks.front.server ARGUMENTS OF SERVE

The HTTP side, the processes and everything between them are the real ones. Each step brings one token for
every running request, all of them ready together; HEADWAY_FRONT_STEPS_PER_SECOND paces the steps on a fixed
grid (0: no pause at all). The token of step s is the same for all requests, and the time at which step s was
ready stands at place s of the array of nanoseconds in the file HEADWAY_FRONT_TIMES.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from benchmarks.front.model_folder import NUM_STEP_TOKENS, step_token_ids

from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.config import EngineConfig, Limits
from headway_runtime.engine_options import EngineOptions
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import FinishReason, Request, RequestOutput
from headway_runtime.server.engine_process import run
from headway_runtime.server.messages import Launch
from headway_runtime.server.options import parse_options
from headway_runtime.server.serve import serve

STEPS_VARIABLE = "HEADWAY_FRONT_STEPS_PER_SECOND"
TIMES_VARIABLE = "HEADWAY_FRONT_TIMES"
MOST_STEPS = 1 << 20
# Longer prompts get one token and end: they are there to be tokenized.
LONGEST_SERVED_PROMPT = 1000


@dataclass(slots=True)
class Outputs:
    outputs: list[RequestOutput] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    request: Request
    num_left: int
    is_new: bool = True


class MeteredEngine:
    """The engine's interface over a table of running requests."""

    def __init__(self, options: EngineOptions, metrics: EngineMetrics) -> None:
        self.config = EngineConfig(
            model_path=options.model_path,
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=options.max_model_len,
            block_size=16,
            kv_cache_memory_bytes=1,
            envelope=options.envelope,
            limits=options.limits,
            max_waiting=options.max_waiting,
            num_threads=1,
        )
        self.limits = options.limits
        self.max_model_len = options.max_model_len
        self.num_kv_tokens = 1 << 30
        self.kv_dtype = "bfloat16"
        self.weight_compression = "none"
        self.adapters = None
        self.kv_blocks_total = self.num_kv_tokens // 16
        self.kv_blocks_used = self.kv_blocks_cached = 0
        self.kv_wasted_share = 0.0
        self.num_waiting = 0
        self._metrics = metrics
        self._running: dict[str, _Sequence] = {}
        self._token_ids = step_token_ids(Path(options.model_path))
        steps_per_second = float(os.environ[STEPS_VARIABLE])
        self._step_seconds = 1.0 / steps_per_second if steps_per_second else 0.0
        self._next_at = 0.0
        self._num_steps = 0
        with open(os.environ[TIMES_VARIABLE], "r+b") as file:
            self._times = memoryview(mmap.mmap(file.fileno(), MOST_STEPS * 8)).cast("q")

    def __getattr__(self, name: str) -> int:
        """Numbers of the real engine's that this one has no use for, for the state that is asked for."""
        if name.startswith(("num_", "kv_")):
            return 0
        raise AttributeError(name)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def oldest_waiting_seconds(self, now: float) -> float:
        return 0.0

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits

    def adapter_snapshot(self) -> AdapterSnapshot:
        return AdapterSnapshot()

    @property
    def has_idle_work(self) -> bool:
        return False

    def work_idly(self) -> None:
        """There is nothing to do between requests."""

    def close(self) -> None:
        """There is nothing to end."""

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def add_request(self, request: Request, now: float) -> None:
        self._metrics.received()
        long = len(request.prompt_token_ids) > LONGEST_SERVED_PROMPT
        self._running[request.request_id] = _Sequence(request, 1 if long else request.sampling.max_tokens)

    def abort(self, request_id: str, now: float) -> bool:
        return self._running.pop(request_id, None) is not None

    def finish(self, request_id: str, now: float) -> bool:
        return self.abort(request_id, now)

    def step(self, now: float) -> Outputs:
        """Wait for the grid's next tick; a tick that was missed by far is not made up for."""
        self._next_at = max(self._next_at + self._step_seconds, now - self._step_seconds)
        while (left := self._next_at - time.monotonic()) > 0:
            time.sleep(left)
        number = self._num_steps
        self._num_steps += 1
        tokens = (self._token_ids[number % NUM_STEP_TOKENS],)
        nanoseconds = time.monotonic_ns()
        self._times[number % MOST_STEPS] = nanoseconds
        now = nanoseconds / 1e9
        return Outputs([self._advance(sequence, tokens, now) for sequence in list(self._running.values())])

    def _advance(self, sequence: _Sequence, tokens: tuple[int, ...], now: float) -> RequestOutput:
        sequence.num_left -= 1
        request_id = sequence.request.request_id
        is_new, sequence.is_new = sequence.is_new, False
        reason = None
        if sequence.num_left == 0:
            reason = FinishReason.LENGTH
            del self._running[request_id]
        queue_seconds = 0.0 if is_new else None
        return RequestOutput(request_id, tokens, reason, computed_at=now, queue_seconds=queue_seconds)


def make_metered(
    options: EngineOptions, metrics: EngineMetrics, mark: Callable[[str], None]
) -> MeteredEngine:
    engine = MeteredEngine(options, metrics)
    mark("model")
    return engine


def main(argv: list[str]) -> int:
    if argv[0] == "--engine":
        return run(msgspec.json.decode(argv[1], type=Launch), make_metered)
    command = [sys.executable, "-m", "benchmarks.front.server", "--engine"]
    return serve(parse_options(argv), time.monotonic(), command)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
