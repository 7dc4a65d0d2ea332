"""Stage 1: whether tokens are right, before anything is timed.

Small random models are served in mixed batches of chunks and decodes, and each greedy token is judged by
transformers in float32: how far below the best logit it was, against how far transformers' own rounding goes.
"""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.engines import EngineOptions, add, drain, make_engine, random_prompt
from benchmarks.gpu.interpreted import num_launches
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.shapes import TINY, TINY_MOE, TINY_QWEN3, Shape

from headway_runtime.config import Device, Dtype

# Between float32 logits that were added up in another order.
FLOAT32_TOLERANCE = 1e-3
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
# Tokens of prompts, and of each answer.
LENGTHS = (1, 9, 33, 100, 150), 64
SMOKE_LENGTHS = (3, 18), 4
# What all rows together want, those of engine_checks.py too, and leave when the checks of kernels end.
ALL_SECONDS = 255.0
# Large enough that logits differ by more than rounding, small enough to load at once.
WIDER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.1}
SMALL: dict[str, Shape] = {"llama": TINY, "qwen3": TINY_QWEN3, "qwen3-moe": TINY_MOE}
MODELS: dict[str, tuple[Shape, str]] = {
    "llama": (TINY | WIDER, "Llama"),
    "qwen3": (TINY_QWEN3 | WIDER | {"head_dim": 64}, "Qwen3"),
    "qwen3-moe": (TINY_MOE | WIDER | {"head_dim": 64, "moe_intermediate_size": 64}, "Qwen3Moe"),
}


# For the interpreter.
NARROWER = {"vocab_size": 128, "num_hidden_layers": 1, "initializer_range": 0.1}


def small_engine(dtype: Dtype) -> EngineOptions:
    """Of random weights, unless a caller has others."""
    return {
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_batched_tokens": 64,
        "kv_cache_memory_bytes": 16 * 2**20,
        "dtype": dtype,
    }


def run_checks(report: Report, device: Device, *, is_smoke: bool) -> None:
    """Every model in float32 and bfloat16."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    lengths, num_tokens = SMOKE_LENGTHS if is_smoke else LENGTHS
    for name, (wider, family) in MODELS.items():
        shape = SMALL[name] | NARROWER if is_smoke else wider
        for dtype in DTYPES:
            measure = partial(
                check_tokens, shape, family, dtype, device, lengths, num_tokens, report.check_time
            )
            report.row("checks", f"{name} {dtype}", measure)


def model_config(shape: Shape, family: str) -> Any:
    """Of transformers."""
    fields = {
        name: value for name, value in shape.items() if name not in ("dtype", "architectures", "model_type")
    }
    return getattr(transformers, f"{family}Config")(**fields)


def check_tokens(
    shape: Shape,
    family: str,
    dtype: Dtype,
    device: Device,
    prompt_lengths: tuple[int, ...],
    num_tokens: int,
    check_time: Callable[[], None],
) -> Row:
    """num_different: tokens that are not the best in float32. largest_gap, tolerance: in logits.

    num_launches: of interpreted kernels, where kernels are interpreted.
    """
    before = num_launches()
    torch.manual_seed(0)
    config = model_config(shape, family)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype))
    prompts = [random_prompt(seed, length, shape["vocab_size"]) for seed, length in enumerate(prompt_lengths)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = small_engine(dtype)
        options["is_dummy"] = False
        if device == "cpu":
            options["cuda_graph_sizes"] = (len(prompts),)
        engine = make_engine(Path(folder), device, check_time=check_time, **options)
        for index, prompt in enumerate(prompts):
            add(engine, str(index), prompt, num_tokens)
        tokens = drain(engine, check_time)
        engine.check_integrity()
        engine.close()
    answers = [tokens[str(index)] for index in range(len(prompts))]
    row = judge(model.to(device), prompts, answers)
    return row | ({"num_launches": num_launches() - before} if device == "cpu" else {})


def judge(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> Row:
    """Each answer's tokens one position at a time, along the answer."""
    exact = copy.deepcopy(model).float()
    gaps: list[float] = []
    tolerance = FLOAT32_TOLERANCE
    for prompt, answer in zip(prompts, answers, strict=True):
        token_ids = torch.tensor([prompt + answer], device=model.device)
        with torch.inference_mode():
            rows = slice(len(prompt) - 1, -1)
            best, rounded = exact(token_ids).logits[0, rows], model(token_ids).logits[0, rows].float()
        tolerance = max(tolerance, 3 * float((best - rounded).abs().max()))
        chosen = best.gather(1, token_ids[0, len(prompt) :].unsqueeze(1)).squeeze(1)
        gaps.extend((best.max(dim=-1).values - chosen).tolist())
    return {
        "num_tokens": len(gaps),
        "num_different": sum(gap > 0 for gap in gaps),
        "largest_gap": max(gaps),
        "tolerance": tolerance,
        "is_right": max(gaps) <= tolerance,
    }
