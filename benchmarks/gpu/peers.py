"""Stage 4: the same work by what else can be had where this runs.

transformers' `generate` always, its continuous batching, and `generate` with a static cache and a compiled
step in a CUDA graph, which is gpt-fast's method; vLLM where it is installed. Decoding only, of the same shape
with random weights: what one step of so many sequences takes. Before them single kernels of libraries (see
library_peers.py).
"""

import gc
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.engine_plan import FULL, SMOKE, Plan
from benchmarks.gpu.report import Report, Row

from headway_runtime.config import Device


def run_peers(report: Report, device: Device, *, is_smoke: bool) -> None:
    """A row per peer and batch size."""
    from benchmarks.gpu.library_peers import run_library_peers  # imports Triton

    run_library_peers(report, device)
    plan = SMOKE if is_smoke else FULL
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: list[Any] = []

    def load() -> Row:
        began_at = time.perf_counter()
        model.append(_random_model(plan, device))
        return {"load_seconds": time.perf_counter() - began_at}

    report.row("peers", "transformers, load", load, needs_seconds=90)
    for batch in plan.batches[:4] if model else ():
        report.row(
            "peers",
            f"transformers generate, decode {batch} at {plan.context}",
            partial(_generate, model[0], plan, batch, device, report.check_time),
            needs_seconds=60,
        )
    for batch in plan.batches[:4] if model else ():
        report.row(
            "peers",
            f"transformers generate_batch, decode {batch} at {plan.context}",
            partial(_continuous, model[0], plan, batch, device),
            needs_seconds=60,
        )
    for batch in (plan.batches[0], plan.traced) if model else ():
        report.row(
            "peers",
            f"transformers compiled with a static cache, decode {batch} at {plan.context}",
            partial(
                _generate, model[0], plan, batch, device, report.check_time, cache_implementation="static"
            ),
            needs_seconds=120,
        )
    model.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    if importlib.util.find_spec("vllm") is None:
        print("peers | vllm | left out: it is not installed")
        return
    report.row("peers", "vllm", partial(_vllm, plan, report.check_time), needs_seconds=240)


def _random_model(plan: Plan, device: Device) -> Any:
    fields = {k: v for k, v in plan.llama.items() if k not in ("dtype", "architectures", "model_type")}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
            return model.eval()
    finally:
        torch.set_default_dtype(torch.float32)


def _generate(
    model: Any, plan: Plan, batch: int, device: Device, check_time: Callable[[], None], **options: Any
) -> Row:
    """A step is what 1 + `steps` tokens take more than one, over `steps`. options: of `generate`."""
    token_ids = torch.randint(0, plan.llama["vocab_size"], (batch, plan.context), device=device)

    def seconds(num_tokens: int) -> float:
        check_time()
        began_at = time.perf_counter()
        model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_at

    # Both lengths: a compiled step is made for the size of its cache.
    for num_tokens in (1, plan.steps + 1):
        seconds(num_tokens)
    step = (seconds(plan.steps + 1) - seconds(1)) / plan.steps
    return {"step_milliseconds": step * 1e3, "tokens_per_second": batch / step}


def _continuous(model: Any, plan: Plan, batch: int, device: Device) -> Row:
    """A step is the median time between two tokens of the request that came last; no token ends an answer."""
    prompts = [torch.randint(0, plan.llama["vocab_size"], (plan.context,)).tolist() for _ in range(batch)]
    config: Any = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=plan.steps + 1, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options: dict[str, Any] = {}
    if device == "cpu":
        # Else it takes most of the machine's memory, which takes a minute.
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    try:
        answers = model.generate_batch(
            inputs=prompts, generation_config=config, record_timestamps=True, progress_bar=False, **options
        )
    finally:
        # What it sets and, where it fails, leaves.
        model.set_attn_implementation("sdpa")
    told_at = max((answer.timestamps for answer in answers.values()), key=max)
    step = statistics.median(later - earlier for earlier, later in pairwise(told_at))
    return {"step_milliseconds": step * 1e3, "tokens_per_second": batch / step}


def _vllm(plan: Plan, check_time: Callable[[], None]) -> Iterator[Row]:
    """After each batch size."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plan.llama), encoding="utf-8")
        began_at = time.perf_counter()
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192)
        row: Row = {"load_seconds": time.perf_counter() - began_at}
        yield row
        for batch in plan.batches:
            check_time()
            prompts = [
                {"prompt_token_ids": torch.randint(0, plan.llama["vocab_size"], (plan.context,)).tolist()}
                for _ in range(batch)
            ]
            seconds = []
            for num_tokens in (2, 1, plan.steps + 1):
                params = SamplingParams(
                    temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
                )
                began_at = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - began_at)
            row[f"decode_{batch}_milliseconds"] = (seconds[2] - seconds[1]) / plan.steps * 1e3
            yield row
