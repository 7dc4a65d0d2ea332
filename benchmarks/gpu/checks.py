"""Stage 1: whether tokens are right, before anything is timed.

Small random models are served in mixed batches of chunks and decodes, and each greedy token is judged by
transformers in float32: how far below the best logit it was, against how far transformers' own rounding goes.
"""

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.engines import add, drain, make_engine, random_prompt
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.shapes import TINY, TINY_MOE, TINY_QWEN3, Shape

from headway_runtime.config import Device, Dtype

# Between float32 logits that were added up in another order.
FLOAT32_TOLERANCE = 1e-3
PROMPT_LENGTHS = (1, 9, 33, 100, 150)
ANSWER_TOKENS = 64
# Large enough that logits differ by more than rounding, small enough to load at once.
WIDER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.1}
MODELS: dict[str, tuple[Shape, str]] = {
    "llama": (TINY | WIDER, "Llama"),
    "qwen3": (TINY_QWEN3 | WIDER | {"head_dim": 64}, "Qwen3"),
    "qwen3-moe": (TINY_MOE | WIDER | {"head_dim": 64, "moe_intermediate_size": 64}, "Qwen3Moe"),
}


def run_checks(report: Report, device: Device) -> None:
    """Every model in float32 and bfloat16."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for name, (shape, family) in MODELS.items():
        for dtype in dtypes:
            report.row(
                "checks",
                f"{name} {dtype}",
                partial(check_tokens, shape, family, dtype, device),
            )


def check_tokens(shape: Shape, family: str, dtype: Dtype, device: Device) -> Row:
    """num_different: tokens that are not the best in float32. largest_gap, tolerance: in logits."""
    torch.manual_seed(0)
    fields = {
        name: value for name, value in shape.items() if name not in ("dtype", "architectures", "model_type")
    }
    config = getattr(transformers, f"{family}Config")(**fields)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype))
    prompts = [random_prompt(seed, length, shape["vocab_size"]) for seed, length in enumerate(PROMPT_LENGTHS)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = make_engine(
            Path(folder),
            device,
            max_model_len=512,
            max_num_seqs=64,
            max_batched_tokens=64,
            dtype=dtype,
            is_dummy=False,
            kv_cache_memory_bytes=16 * 2**20,
        )
        for index, prompt in enumerate(prompts):
            add(engine, str(index), prompt, ANSWER_TOKENS)
        tokens = drain(engine)
        engine.check_integrity()
        engine.close()
    answers = [tokens[str(index)] for index in range(len(prompts))]
    return judge(model.to(device), prompts, answers)


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
