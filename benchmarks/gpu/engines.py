"""Engines of random weights, driven step by step in this process: the core alone, nothing of HTTP."""

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Required, TypedDict, Unpack

import torch
from benchmarks.gpu.shapes import Shape

from headway_runtime.config import (
    Device,
    Dtype,
    EngineConfig,
    Envelope,
    Limits,
    OffloadConfig,
    SpeculativeConfig,
)
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, SamplingParams


def forever() -> None:
    """There is always time."""


class EngineOptions(TypedDict, total=False):
    """See `engine_config`."""

    max_model_len: Required[int]
    max_num_seqs: Required[int]
    max_batched_tokens: Required[int]
    dtype: Dtype
    quantization: str
    is_dummy: bool
    kv_cache_memory_bytes: int | None
    speculative: SpeculativeConfig | None
    num_guesses: int
    enable_prefix_caching: bool
    cuda_graph_sizes: tuple[int, ...] | None
    enforce_eager: bool
    offload: OffloadConfig | None


def make_engine(
    folder: Path,
    device: Device,
    *,
    check_time: Callable[[], None] = forever,
    **options: Unpack[EngineOptions],
) -> EngineCore:
    """An engine of the model in `folder`. check_time: raises where there is none left, and ends what is under
    way."""
    with ExitStack() as unless_made:
        engine = EngineCore(engine_config(folder, device, **options), EngineMetrics())
        unless_made.callback(engine.close)
        while engine.has_idle_work:
            check_time()
            engine.work_idly()
        unless_made.pop_all()
    return engine


def engine_config(
    folder: Path,
    device: Device,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    dtype: Dtype = "bfloat16",
    quantization: str = "auto",
    is_dummy: bool = True,
    kv_cache_memory_bytes: int | None = None,
    speculative: SpeculativeConfig | None = None,
    num_guesses: int = 0,
    enable_prefix_caching: bool = True,
    cuda_graph_sizes: tuple[int, ...] | None = None,
    enforce_eager: bool = False,
    offload: OffloadConfig | None = None,
) -> EngineConfig:
    """is_dummy: weights are random, and config.json is all that `folder` needs.

    cuda_graph_sizes: of decode steps that are recorded, all of them before the first step; None: the usual
    ones, of which a server records some while it is idle.
    """
    envelope = Envelope(max_num_seqs, max_batched_tokens, num_guesses)
    return EngineConfig(
        model_path=str(folder),
        device=device,
        dtype=dtype,
        load_format="dummy" if is_dummy else "auto",
        max_model_len=max_model_len,
        block_size=16,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        envelope=envelope,
        limits=Limits(max_num_seqs, max_batched_tokens, num_guesses),
        max_waiting=4096,
        num_threads=1,
        quantization=quantization,
        speculative=speculative,
        enable_prefix_caching=enable_prefix_caching,
        long_prefill_share=1.0,
        overlap=True,
        cuda_graph_sizes=cuda_graph_sizes,
        enforce_eager=enforce_eager,
        offload=offload,
    )


def make_random(shape: Shape, device: Device, **options: object) -> tuple[EngineCore, float]:
    """An engine of a shape with random weights, and the seconds that making it took."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        began_at = time.perf_counter()
        engine = make_engine(Path(folder), device, **options)  # type: ignore[arg-type]
        if device == "cuda":
            torch.cuda.synchronize()
        return engine, time.perf_counter() - began_at


def add(engine: EngineCore, request_id: str, prompt: list[int], max_tokens: int) -> None:
    """A greedy request whose answer is as long as asked."""
    now = time.monotonic()
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine.add_request(Request(request_id, tuple(prompt), sampling, now), now)


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Token ids; another seed shares no beginning."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return tokens


def drain(engine: EngineCore, check_time: Callable[[], None] = forever) -> dict[str, list[int]]:
    """Step until nothing is left. Tokens by request."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        check_time()
        for output in engine.step(time.monotonic()).outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens
