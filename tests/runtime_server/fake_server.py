"""`headway serve` with an engine that computes nothing: `python fake_server.py ARGUMENTS OF SERVE`.

The server, its two processes and everything between them are real. The engine answers with the prompt's own
tokens, over and over, one per step, so that a test knows what must come; the first token of a prompt may ask
for a fault instead. The log-probability of a prompt's token number n is -n/4. A prompt that has come before
with the same cache salt is cached but for its last token. All that wait are called late.
HEADWAY_FAKE_STEP_SECONDS paces it.
HEADWAY_FAKE_GARBAGE_FILE names a file that says how many objects the garbage collector has found in the HTTP
process, collection by collection, of which there is one every GARBAGE_SECONDS at least.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.config import EngineConfig, Limits
from headway_runtime.engine_options import EngineOptions
from headway_runtime.errors import QueueFullError
from headway_runtime.metrics import EngineMetrics, RejectReason
from headway_runtime.request import FinishReason, Request, RequestOutput, TokenLogprobs
from headway_runtime.server.engine_process import run
from headway_runtime.server.messages import Launch
from headway_runtime.server.options import parse_options
from headway_runtime.server.serve import serve

# First tokens that ask for a fault.
DIE = 2  # the step raises: the engine process ends
FAIL = 3  # the request ends with an error
FAIL_LATER = 4  # the same, after two tokens

BLOCK_SIZE = 16
NUM_BLOCKS = 512
# Between two looks at the garbage.
GARBAGE_SECONDS = 0.25


@dataclass(slots=True)
class Sequence:
    request: Request
    generated: int = 0
    scheduled: bool = False

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.request.prompt_token_ids) + self.generated) // BLOCK_SIZE)


@dataclass(slots=True)
class Outputs:
    outputs: list[RequestOutput] = field(default_factory=list)


class FakeEngine:
    """The engine's interface over a list of sequences."""

    def __init__(self, options: EngineOptions, metrics: EngineMetrics) -> None:
        self.config = EngineConfig(
            model_path=options.model_path,
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=options.max_model_len,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1,
            envelope=options.envelope,
            limits=options.limits,
            max_waiting=options.max_waiting,
            num_threads=1,
        )
        self.limits = options.limits
        self.max_model_len = options.max_model_len
        self.num_kv_tokens = NUM_BLOCKS * BLOCK_SIZE
        self.kv_dtype = "bfloat16"
        self.weight_compression = "12-bit"
        self.adapters = None
        self.has_idle_work = False
        self.kv_blocks_total = NUM_BLOCKS
        self.kv_blocks_cached = 0
        self.kv_wasted_share = 0.0
        self._metrics = metrics
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._step_seconds = float(os.environ.get("HEADWAY_FAKE_STEP_SECONDS", "0"))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_blocks_used(self) -> int:
        return sum(sequence.num_blocks for sequence in self._running)

    def oldest_waiting_seconds(self, now: float) -> float:
        return max((now - sequence.request.received_at for sequence in self._waiting), default=0.0)

    def set_limits(self, limits: Limits) -> None:
        self.config.envelope.check(limits)
        self.limits = limits

    def adapter_snapshot(self) -> AdapterSnapshot:
        return AdapterSnapshot()

    def close(self) -> None:
        """There is nothing to end."""

    def work_idly(self) -> None:
        raise AssertionError("there is none")

    def reset_prefix_cache(self) -> None:
        self._seen.clear()

    def add_request(self, request: Request, now: float) -> None:
        self._metrics.received()
        if len(self._waiting) >= self.config.max_waiting:
            self._metrics.rejected(RejectReason.QUEUE_FULL)
            raise QueueFullError(len(self._waiting), 7)
        self._waiting.append(Sequence(request))

    def abort(self, request_id: str, now: float) -> bool:
        return self._take_out(request_id, FinishReason.ABORT, now)

    def finish(self, request_id: str, now: float) -> bool:
        return self._take_out(request_id, FinishReason.STOP, now)

    def step(self, now: float) -> Outputs:
        time.sleep(self._step_seconds)
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting.pop(0)
            self._metrics.scheduled(now - sequence.request.received_at)
            self._running.append(sequence)
        self._metrics.step(self._step_seconds, 0, len(self._running))
        return Outputs([self._advance(sequence, now) for sequence in list(self._running)])

    def _advance(self, sequence: Sequence, now: float) -> RequestOutput:
        request, prompt = sequence.request, sequence.request.prompt_token_ids
        if prompt[0] == DIE:
            raise RuntimeError("asked to die")
        if prompt[0] == FAIL or (prompt[0] == FAIL_LATER and sequence.generated == 2):
            self._take_out(request.request_id, FinishReason.ERROR, now)
            return RequestOutput(request.request_id, (), FinishReason.ERROR, error="asked to fail")
        token_id = prompt[sequence.generated % len(prompt)]
        sequence.generated += 1
        self._metrics.tokens(generated=1)
        reason = None
        if token_id in request.sampling.stop_token_ids and sequence.generated > request.sampling.min_tokens:
            reason = FinishReason.STOP
        elif sequence.generated == request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._take_out(request.request_id, reason, now)
        is_first = sequence.generated == 1
        is_between, num_waiting = not is_first and reason is None, len(self._waiting)
        key = (request.cache_salt, prompt)
        num_cached = len(prompt) - 1 if is_first and key in self._seen else 0
        self._seen.add(key)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.num_logprobs is not None:
            best = ((token_id, -0.5), (token_id + 1, float("-inf")))
            logprobs = (TokenLogprobs(-0.5, best[: request.sampling.num_logprobs]),)
        return RequestOutput(
            request.request_id,
            (token_id,),
            reason,
            logprobs,
            computed_at=now,
            num_cached_tokens=num_cached,
            prompt_logprobs=_prompt_logprobs(request) if is_first else None,
            late_share=None if is_between else num_waiting / (num_waiting + max(1, len(self._running))),
            max_num_seqs=None if is_between else self.limits.max_num_seqs,
        )

    def _take_out(self, request_id: str, reason: FinishReason, now: float) -> bool:
        for sequences in (self._waiting, self._running):
            for sequence in sequences:
                if sequence.request.request_id == request_id:
                    sequences.remove(sequence)
                    self._metrics.finished(reason, now - sequence.request.received_at, None)
                    return True
        return False


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    """Of the best tokens, a prompt's own is the second."""
    num_top = request.sampling.num_prompt_logprobs
    if num_top is None:
        return None
    own = [(token_id, -place / 4) for place, token_id in enumerate(request.prompt_token_ids)]
    return (
        None,
        *(
            TokenLogprobs(logprob, (((token_id + 1) % 300, -0.125), (token_id, logprob))[:num_top], 2)
            for token_id, logprob in own[1:]
        ),
    )


def make_fake(options: EngineOptions, metrics: EngineMetrics, mark: Callable[[str], None]) -> FakeEngine:
    if os.environ.get("HEADWAY_FAKE_NEVER_READY"):
        time.sleep(3600)
    mark("model")
    return FakeEngine(options, metrics)


def main(argv: list[str]) -> int:
    if argv[0] == "--engine":
        return run(msgspec.json.decode(argv[1], type=Launch), make_fake)
    if path := os.environ.get("HEADWAY_FAKE_GARBAGE_FILE"):
        gc.callbacks.append(partial(note_garbage, path))
        threading.Thread(target=keep_collecting, daemon=True).start()
    return serve(parse_options(argv), time.monotonic(), [sys.executable, __file__, "--engine"])


def note_garbage(path: str, phase: str, found: dict[str, int]) -> None:
    if phase == "stop":
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{found['collected']}\n")


def keep_collecting() -> None:
    """How often the collector comes by itself depends on what is alive at the same time."""
    while True:
        time.sleep(GARBAGE_SECONDS)
        gc.collect()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
