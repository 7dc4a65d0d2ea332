"""First numbers of the engine on one GPU: right tokens, decode speed and prefill speed of a random 8B Llama.

    PYTHONPATH=runtime python benchmarks/gpu/run.py --out results.json

needs torch, transformers, safetensors and numpy only, and ends within ten minutes. It writes one JSON and
prints a short table; it exits with 1 if a token is further from the best than rounding can explain. `--smoke`
runs all of it on the CPU with a tiny shape, to prove that the script works; its numbers mean nothing.
One file, a little long for that, so that it goes to such a machine with nothing but the package beside it.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from headway_runtime.config import Device, Dtype, EngineConfig, Envelope, Limits
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, SamplingParams

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Llama-3.1-8B's config.json, as far as it decides shapes and arithmetic.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": LLAMA3_ROPE,
    "dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Between float32 logits that were added up in another order.
FLOAT32_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. Lengths in tokens."""

    device: Device
    shape: dict[str, Any]
    decode_batches: tuple[int, ...]
    decode_context: int
    decode_steps: int
    prefill_lengths: tuple[int, ...]
    kv_cache_memory_bytes: int


FULL = Plan("cuda", LLAMA_8B, (1, 16, 64), 512, 96, (2048, 8192), 24 * 2**30)
SMOKE = Plan("cpu", TINY, (1, 4), 24, 6, (64, 256), 16 * 2**20)


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Greedy tokens against transformers in float32 arithmetic.

    largest_gap: how far, in logits, a token was below the best. tolerance: for two logits of a computation
    that is half as wrong again as transformers' own in this dtype.
    """

    dtype: str
    num_tokens: int
    num_different: int
    largest_gap: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.largest_gap <= self.tolerance


def make_engine(
    folder: Path, plan: Plan, dtype: Dtype, *, dummy: bool, max_batched_tokens: int
) -> EngineCore:
    envelope = Envelope(64, max_batched_tokens)
    return EngineCore(
        EngineConfig(
            model_path=str(folder),
            device=plan.device,
            dtype=dtype,
            load_format="dummy" if dummy else "auto",
            max_model_len=max(plan.prefill_lengths) + 64,
            block_size=16,
            kv_cache_memory_bytes=plan.kv_cache_memory_bytes,
            envelope=envelope,
            limits=Limits(envelope.max_num_seqs, envelope.max_num_batched_tokens),
            max_waiting=1024,
            num_threads=1 if plan.device == "cpu" else os.cpu_count() or 1,
        ),
        EngineMetrics(),
    )


def add(engine: EngineCore, request_id: str, prompt: list[int], max_tokens: int) -> None:
    now = time.monotonic()
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine.add_request(Request(request_id, tuple(prompt), sampling, now), now)


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return tokens


def check_tokens(plan: Plan, dtype: Dtype) -> TokenCheck:
    """A small random model served in mixed batches of chunks and decodes, judged by transformers."""
    torch.manual_seed(0)
    shape = TINY | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "initializer_range": 0.1,
    }
    shape.pop("dtype")
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(getattr(torch, dtype))
    prompts = [
        random_prompt(index, length, TINY["vocab_size"]) for index, length in enumerate((1, 9, 33, 100, 150))
    ]
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = make_engine(Path(folder), plan, dtype, dummy=False, max_batched_tokens=64)
        for index, prompt in enumerate(prompts):
            add(engine, str(index), prompt, max_tokens=64)
        while engine.has_work:
            for output in engine.step(time.monotonic()).outputs:
                tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    return judge(model.to(plan.device), dtype, prompts, list(tokens.values()))


def judge(model: Any, dtype: str, prompts: list[list[int]], answers: list[list[int]]) -> TokenCheck:
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
    return TokenCheck(dtype, len(gaps), sum(gap > 0 for gap in gaps), max(gaps), tolerance)


def measure_decode(engine: EngineCore, plan: Plan, batch: int, floor_milliseconds: float) -> dict[str, float]:
    """The median step of `batch` sequences past `decode_context` tokens, all prompts computed.

    floor_milliseconds: the weights' bytes over the measured read bandwidth.
    """
    for index in range(batch):
        prompt = random_prompt(index, plan.decode_context, plan.shape["vocab_size"])
        add(engine, str(index), prompt, max_tokens=plan.decode_steps)
    seconds: list[float] = []
    while engine.has_work:
        started_at = time.perf_counter()
        outputs = engine.step(time.monotonic())
        if outputs.num_decodes == batch:
            seconds.append(time.perf_counter() - started_at)
    step = statistics.median(seconds)
    return {
        "batch": batch,
        "step_milliseconds": step * 1e3,
        "tokens_per_second": batch / step,
        "floor_milliseconds": floor_milliseconds,
    }


def measure_prefill(engine: EngineCore, plan: Plan, length: int) -> dict[str, float]:
    """One prompt alone to its first token: the median of three, after one that is not counted."""
    seconds: list[float] = []
    for index in range(4):
        add(engine, "prompt", random_prompt(index, length, plan.shape["vocab_size"]), max_tokens=1)
        started_at = time.perf_counter()
        while engine.has_work:
            engine.step(time.monotonic())
        seconds.append(time.perf_counter() - started_at)
    median = statistics.median(seconds[1:])
    return {"prompt_tokens": length, "milliseconds": median * 1e3, "tokens_per_second": length / median}


def read_bandwidth(device: Device) -> float:
    """Bytes per second that summing a large tensor reads."""
    tensor = torch.ones(2**30 if device == "cuda" else 2**24, dtype=torch.float32, device=device)
    seconds: list[float] = []
    for _ in range(5):
        started_at = time.perf_counter()
        tensor.sum().item()
        seconds.append(time.perf_counter() - started_at)
    return tensor.numel() * tensor.element_size() / min(seconds)


def weight_bytes(shape: dict[str, Any]) -> int:
    """Bytes of bfloat16 weights that one decode step reads: all layers and the head."""
    hidden, head_dim = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    per_layer = hidden * head_dim * heads + 3 * hidden * shape["intermediate_size"]
    return int(2 * (shape["num_hidden_layers"] * per_layer + shape["vocab_size"] * hidden))


def environment(device: Device) -> dict[str, Any]:
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    )
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": git.stdout.strip() or None,
        "command": " ".join(sys.argv),
    }


def run(plan: Plan) -> dict[str, Any]:
    started_at = time.perf_counter()
    bandwidth = read_bandwidth(plan.device)
    floor_milliseconds = weight_bytes(plan.shape) / bandwidth * 1e3
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    checks = [check_tokens(plan, dtype) for dtype in dtypes]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plan.shape))
        loading_at = time.perf_counter()
        engine = make_engine(
            Path(folder), plan, "bfloat16", dummy=True, max_batched_tokens=max(plan.prefill_lengths)
        )
        load_seconds = time.perf_counter() - loading_at
    measure_decode(engine, plan, 1, floor_milliseconds)  # warms up
    decode = [measure_decode(engine, plan, batch, floor_milliseconds) for batch in plan.decode_batches]
    prefill = [measure_prefill(engine, plan, length) for length in plan.prefill_lengths]
    engine.check_integrity()
    return {
        "environment": environment(plan.device),
        "shape": plan.shape,
        "decode_context_tokens": plan.decode_context,
        "read_bandwidth_gigabytes_per_second": bandwidth / 1e9,
        "load_seconds": load_seconds,
        "token_checks": [asdict(check) | {"is_right": check.is_right} for check in checks],
        "decode": decode,
        "prefill": prefill,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if plan.device == "cuda" else None,
        "total_seconds": time.perf_counter() - started_at,
    }


def print_table(results: dict[str, Any]) -> None:
    print(f"{results['environment']['device']}, torch {results['environment']['torch']}")
    print(f"read bandwidth {results['read_bandwidth_gigabytes_per_second']:.0f} GB/s")
    for check in results["token_checks"]:
        verdict = "right" if check["is_right"] else "WRONG"
        print(
            f"tokens {check['dtype']:9} {verdict}: {check['num_different']} of {check['num_tokens']} differ, "
            f"largest gap {check['largest_gap']:.2g} of {check['tolerance']:.2g}"
        )
    for speed in results["decode"]:
        print(
            f"decode batch {speed['batch']:3}: {speed['step_milliseconds']:8.2f} ms/step "
            f"{speed['tokens_per_second']:9.0f} tokens/s (floor {speed['floor_milliseconds']:.2f} ms)"
        )
    for speed in results["prefill"]:
        print(
            f"prefill {speed['prompt_tokens']:5}: {speed['milliseconds']:8.1f} ms "
            f"{speed['tokens_per_second']:9.0f} tokens/s"
        )
    print(f"{results['total_seconds']:.0f} s in all")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--smoke", action="store_true", help="tiny shape on the CPU")
    arguments = parser.parse_args()
    plan = SMOKE if arguments.smoke else FULL
    if plan.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; use --smoke to try the script without one")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    results = run(plan)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)
    return 0 if all(check["is_right"] for check in results["token_checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
