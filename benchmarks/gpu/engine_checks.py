"""The rest of stage 1: whether an engine's steps are what they should be, whatever requests ask of them.

    compiled after ready    none: whoever asks for something rare waits for no compiler
    recorded and not        the same tokens, where a step ends in logits or checks guesses too
    launched early and not  the same tokens, of recorded steps
    pinned memory           what was asked for, as the machine may not have more, and none after the end

Small random models, as for the checks of tokens, and but for launches of a shape that no other check compiles
kernels for.
"""

import gc
import itertools
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.gpu.checks import MODELS, small_engine
from benchmarks.gpu.engines import EngineOptions, drain, engine_config, make_engine, random_prompt
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.shapes import TINY, Shape

from headway_runtime.config import Device, OffloadConfig, SpeculativeConfig
from headway_runtime.engine import EngineCore
from headway_runtime.kernels.triton import overlap
from headway_runtime.kernels.triton.launch import gpu_of
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, SamplingParams

OWN: Shape = TINY | {
    "hidden_size": 320,
    "intermediate_size": 576,
    "head_dim": 64,
    "initializer_range": 0.1,
}
SMOKE_OWN: Shape = TINY | {"vocab_size": 128, "num_hidden_layers": 1, "initializer_range": 0.1}
# Sequences at a time: one, more than a class of few rows, and more than products without recordings have.
COUNTS, SMOKE_COUNTS = (1, 17, 129), (1, 3)
LENGTH, NUM_TOKENS = 40, 12
SMOKE_LENGTH, SMOKE_NUM_TOKENS = 9, 3
GREEDY = SamplingParams(temperature=0.0)
ASKED: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "top-k": SamplingParams(top_k=20, seed=5),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "log-probabilities": SamplingParams(temperature=0.0, num_logprobs=5),
}
# Of these, whose recorded steps no other check sees.
LOGITS_ARE_WANTED = ("penalties", "log-probabilities")
NUM_GUESSES = 3
# Whoever compiles from nothing, and starts two engines.
COMPILING_SECONDS, ENGINES_SECONDS = 90.0, 45.0
# Decode steps with early launches and without, of so many sequences. Kernels of the first have been compiled.
EARLY_STEPS, EARLY_COUNT = 300, 8
EARLY_SECONDS = 45.0
OFFLOAD_BYTES = 5 << 30
# Beside it an engine takes some memory of its own.
PINNED_TOLERANCE = 0.05
CACHE_VARIABLE = "TRITON_CACHE_DIR"

_numbers = itertools.count()


def run_engine_checks(report: Report, device: Device, *, is_smoke: bool) -> None:
    """A row each. Memory is pinned on a GPU alone, and launches are early on those that can.

    Kernels are compiled into a folder that is empty at first, so that none of another run's is there.
    """
    check = EngineCheck(device, report.check_time, is_smoke=is_smoke)
    with _empty_cache():
        report.row("checks", "compiled after ready", check.compiled, needs_seconds=COMPILING_SECONDS)
        for name in LOGITS_ARE_WANTED:
            measure = partial(check.recorded, ASKED[name])
            report.row("checks", f"recorded and not, {name}", measure, needs_seconds=ENGINES_SECONDS)
        measure = partial(check.recorded, GREEDY, guesses=True)
        report.row("checks", "recorded and not, n-gram guesses", measure, needs_seconds=ENGINES_SECONDS)
        if device == "cuda":
            report.row("checks", "pinned memory", check.pinned)
    if device == "cuda" and can_launch_early(device):
        report.row("checks", "launched early and not", check.launched_early, needs_seconds=EARLY_SECONDS)


class EngineCheck:
    """What the rows have in common."""

    def __init__(self, device: Device, check_time: Callable[[], None], *, is_smoke: bool) -> None:
        self._device, self._check_time = device, check_time
        self._shape = SMOKE_OWN if is_smoke else OWN
        self._counts = SMOKE_COUNTS if is_smoke else COUNTS
        self._length = SMOKE_LENGTH if is_smoke else LENGTH
        self._num_tokens = SMOKE_NUM_TOKENS if is_smoke else NUM_TOKENS

    def compiled(self) -> Row:
        """num_compiled: kernels, after the start, by what any request may ask; names: of some of them."""
        with _folder(self._shape) as folder:
            config = engine_config(folder, self._device, **self._options(guesses=True))
            engine = EngineCore(config, EngineMetrics())
            with _compiled_kernels() as names:
                while engine.has_idle_work:
                    self._check_time()
                    engine.work_idly()
                for params in ASKED.values():
                    for count in self._counts:
                        self._answers(engine, params, count)
                # The same prompts again, whose prefixes are cached.
                self._answers(engine, GREEDY, self._counts[-1])
            engine.close()
        return {"num_compiled": len(names), "names": sorted(set(names))[:8], "is_right": not names}

    def recorded(self, params: SamplingParams, *, guesses: bool = False) -> Row:
        """num_different: tokens, in float32. recorded_share: of the steps of the engine that records."""
        answers: list[list[int]] = []
        share = 0.0
        with _folder(self._shape) as folder:
            for is_eager in (True, False):
                options = self._options(guesses=guesses)
                options["enforce_eager"] = is_eager
                engine = make_engine(folder, self._device, check_time=self._check_time, **options)
                tokens = self._answers(engine, params, self._counts[1])
                answers.append([token for own in tokens for token in own])
                counters = engine.metrics.snapshot().counters
                share = counters["recorded_steps"] / max(1, counters["steps"])
                engine.close()
        plain, replayed = answers
        different = sum(one != other for one, other in zip(plain, replayed, strict=True))
        is_right = different == 0 and share > 0
        return {
            "num_tokens": len(plain),
            "num_different": different,
            "recorded_share": share,
            "is_right": is_right,
        }

    def launched_early(self) -> Row:
        """num_different: tokens of greedy decode steps in bfloat16. Who reads what is not written yet finds
        what the step before left there, which at times is the same: so there are many steps."""
        shape, _ = MODELS["llama"]
        options = small_engine("bfloat16")
        options["cuda_graph_sizes"] = (EARLY_COUNT,)
        answers: list[list[int]] = []
        shares = []
        with _folder(shape) as folder:
            for is_early in (False, True):
                with early_launches(is_early):
                    engine = make_engine(folder, self._device, check_time=self._check_time, **options)
                    tokens = self._answers(engine, GREEDY, EARLY_COUNT, EARLY_STEPS)
                    counters = engine.metrics.snapshot().counters
                    engine.close()
                answers.append([token for own in tokens for token in own])
                shares.append(counters["recorded_steps"] / max(1, counters["steps"]))
        different = sum(one != other for one, other in zip(*answers, strict=True))
        return {
            "num_tokens": len(answers[0]),
            "num_different": different,
            "recorded_share": min(shares),
            "is_right": different == 0 and min(shares) > 0,
        }

    def pinned(self) -> Row:
        """Of the memory that KV blocks go to: what is taken, and not given back, over what was asked for."""
        options = self._options()
        options["offload"] = OffloadConfig(OFFLOAD_BYTES)
        before = main_memory_bytes()
        with _folder(self._shape) as folder:
            engine = make_engine(folder, self._device, check_time=self._check_time, **options)
            taken = main_memory_bytes() - before
            engine.close()
        del engine
        gc.collect()
        share, left = taken / OFFLOAD_BYTES, (main_memory_bytes() - before) / OFFLOAD_BYTES
        return {
            "pinned_bytes": taken,
            "share_of_asked": share,
            "share_left": left,
            "is_right": abs(share - 1) <= PINNED_TOLERANCE and left <= PINNED_TOLERANCE,
        }

    def _options(self, *, guesses: bool = False) -> EngineOptions:
        options: EngineOptions = {
            "max_model_len": 256,
            "max_num_seqs": self._counts[-1],
            "max_batched_tokens": 4 * self._counts[-1] if guesses else max(64, self._counts[-1]),
            "kv_cache_memory_bytes": 64 * 2**20 if self._device == "cuda" else 4 * 2**20,
            "dtype": "float32",
            "cuda_graph_sizes": None if self._device == "cuda" else self._counts,
        }
        if guesses:
            options["speculative"] = SpeculativeConfig("ngram", adaptive=False)
            options["num_guesses"] = NUM_GUESSES
        return options

    def _answers(
        self, engine: EngineCore, params: SamplingParams, count: int, num_tokens: int | None = None
    ) -> list[list[int]]:
        """Of so many sequences together, all of them as long as asked. num_tokens: of each."""
        num_tokens = self._num_tokens if num_tokens is None else num_tokens
        names = [str(next(_numbers)) for _ in range(count)]
        for seed, name in enumerate(names):
            # Twice the same, so that there is something to guess by.
            prompt = random_prompt(seed, self._length, self._shape["vocab_size"]) * 2
            _add(engine, name, prompt, params, num_tokens)
        tokens = drain(engine, self._check_time)
        return [tokens[name] for name in names]


def can_launch_early(device: Device) -> bool:
    """Whether launches of this process are, unless told otherwise."""
    return overlap.lets_next_begin(gpu_of(torch.device(device)))["overlaps"]


@contextmanager
def early_launches(is_early: bool) -> Iterator[None]:  # noqa: FBT001 - what is compared
    """Meanwhile launches are early, or none is, here and in processes that compile kernels."""
    variable, before, was_early = overlap.VARIABLE, os.environ.get(overlap.VARIABLE), overlap.ENABLED
    os.environ[variable], overlap.ENABLED = str(int(is_early)), is_early
    try:
        yield
    finally:
        overlap.ENABLED = was_early
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _add(
    engine: EngineCore, name: str, prompt: Sequence[int], params: SamplingParams, num_tokens: int
) -> None:
    now = time.monotonic()
    engine.add_request(Request(name, tuple(prompt), replace(params, max_tokens=num_tokens), now), now)


@contextmanager
def _folder(shape: Shape) -> Iterator[Path]:
    """With a model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        yield Path(folder)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Triton's folder, of this process and of those that it starts, is another one meanwhile."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before


@contextmanager
def _compiled_kernels() -> Iterator[list[str]]:
    """Names of those that Triton compiles meanwhile; what it finds in its folder is none."""
    names: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            names.append(str(getattr(src, "name", src)))

    knobs = triton.knobs.compilation
    before = knobs.listener
    knobs.listener = note
    try:
        yield names
    finally:
        knobs.listener = before


def main_memory_bytes() -> int:
    """What this process has of it: its pages, and what PyTorch has pinned, which may be among them."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    own = pages * resource.getpagesize()
    pinned = torch.cuda.host_memory_stats() if torch.cuda.is_available() else {}
    return own + int(pinned.get("allocated_bytes.current", 0))
