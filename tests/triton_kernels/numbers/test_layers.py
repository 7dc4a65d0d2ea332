"""Whole models with the fused kernels: the torch path's tokens, and how many launches a layer is."""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from headway_runtime.batch import Batch, Chunk
from headway_runtime.config import EngineConfig, Envelope, Limits
from headway_runtime.layers import kernel_choice
from headway_runtime.request import SamplingParams
from headway_runtime.runner import Runner

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "llama, int8 products": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                    "input_activations": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "token",
                        "dynamic": True,
                    },
                }
            },
            "ignore": ["lm_head"],
        },
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}
PROMPTS = [[5, 9, 33, 2, 71, 8, 150, 12, 40], [77], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
GREEDY = SamplingParams(temperature=0.0)
# Names of PyTorch's operators that only look at what is there, or make room.
FREE: tuple[str, ...] = (
    "view",
    "slice",
    "select",
    "transpose",
    "t",
    "expand",
    "unsqueeze",
    "squeeze",
    "permute",
    "detach",
)
FREE += (
    "alias",
    "split",
    "chunk",
    "as_strided",
    "_unsafe_view",
    "empty",
    "new_empty",
    "empty_like",
    "unbind",
)


@pytest.fixture
def make_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runner]:
    def make(model: str, kernels: str, kv_cache_dtype: Any = "auto", **changes: Any) -> Runner:
        monkeypatch.setattr(kernel_choice, "_choice", lambda: kernels)
        folder = tmp_path / f"{model}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(BASE | MODELS[model] | {"dtype": "float32"} | changes))
        config = EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            max_model_len=64,
            block_size=4,
            kv_cache_memory_bytes=1 << 20,
            envelope=Envelope(8, 64),
            limits=Limits(8, 64),
            max_waiting=8,
            num_threads=1,
            kv_cache_dtype=kv_cache_dtype,
        )
        return Runner(config)

    return make


def generate(runner: Runner, num_steps: int) -> list[list[int]]:
    """Tokens of all prompts, the longest one in two chunks, then one by one."""
    known = [list(prompt) for prompt in PROMPTS]
    blocks = [array("i", range(1 + 10 * number, 11 + 10 * number)[::-1]) for number in range(len(known))]

    def chunk(number: int, start: int, count: int) -> Chunk:
        generated = len(known[number]) - len(PROMPTS[number])
        return Chunk(
            str(number),
            known[number],
            start,
            count,
            blocks[number],
            generated,
            samples=start + count == len(known[number]),
            sampling=GREEDY,
        )

    first = [chunk(1, 0, 1), chunk(0, 0, len(known[0])), chunk(2, 0, 7)]
    result = runner.execute(Batch(tuple(first), 1, sum(one.num_tokens for one in first)))
    starts = {0: len(known[0]), 1: 1, 2: 7}
    for number, sample in zip((1, 0), result.samples, strict=False):
        assert sample is not None
        assert sample.token_id is not None
        known[number].append(sample.token_id)
    for _ in range(num_steps):
        order = sorted(starts, key=lambda number: len(known[number]) - starts[number])
        chunks = tuple(chunk(number, starts[number], len(known[number]) - starts[number]) for number in order)
        num_decodes = sum(one.num_tokens == 1 for one in chunks)
        result = runner.execute(Batch(chunks, num_decodes, sum(one.num_tokens for one in chunks)))
        for number, sample in zip(order, result.samples, strict=True):
            assert sample is not None
            assert sample.token_id is not None
            starts[number] = len(known[number])
            known[number].append(sample.token_id)
    return known


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype"),
    [
        ("llama", "auto"),
        ("qwen2", "fp8"),
        ("qwen3", "auto"),
        ("qwen3", "int8"),
        ("gemma2", "fp8"),
        ("llama, int8 products", "auto"),
    ],
)
def test_tokens_are_those_of_the_torch_path(
    model: str, kv_cache_dtype: str, make_runner: Callable[..., Runner]
) -> None:
    by_torch = generate(make_runner(model, "torch", kv_cache_dtype), 3)

    got = generate(make_runner(model, "triton", kv_cache_dtype), 3)

    assert got == by_torch
    assert len({tuple(one[-4:]) for one in got}) > 1


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be a launch on a GPU: kernels of Triton, and operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.is_off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket.__name__)
        if not self.is_off and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counting = Launches()
    run = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        counting.counts[self.fn.__name__] += 1
        with counting.uncounted():
            run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    return counting


@pytest.mark.parametrize(("model", "want"), [("llama", 8), ("qwen3", 8), ("gemma2", 9)])
def test_a_decode_layer_is_few_launches(
    model: str, want: int, make_runner: Callable[..., Runner], launches: Launches
) -> None:
    of_layers = []
    for num_layers in (2, 4):
        runner = make_runner(model, "triton", num_hidden_layers=num_layers)
        chunk = Chunk("a", [5, 6, 7], 2, 1, array("i", [3]), 1, samples=True, sampling=GREEDY)
        launches.counts.clear()
        with launches:
            runner.execute(Batch((chunk,), 1, 1))
        of_layers.append(launches.counts.copy())

    per_layer = of_layers[1] - of_layers[0]
    assert per_layer["norm_kernel"] == (6 if model == "gemma2" else 4)
    assert per_layer["rotate_and_store_kernel"] == 2
    assert per_layer["gated_product_kernel"] == 2
    assert per_layer["mm"] + per_layer["addmm"] + per_layer["linear"] == 6
    assert sum(per_layer.values()) == 2 * want, dict(per_layer)


def test_rows_are_made_codes_by_the_kernels_before_products_of_codes(
    make_runner: Callable[..., Runner], launches: Launches
) -> None:
    runner = make_runner("llama, int8 products", "triton", num_hidden_layers=1)
    chunk = Chunk("a", [5, 6, 7], 2, 1, array("i", [3]), 1, samples=True, sampling=GREEDY)
    with launches:
        runner.execute(Batch((chunk,), 1, 1))

    # What attention makes is the only input that needs a kernel to become codes.
    assert launches.counts["coded_rows_kernel"] == 1
    assert launches.counts["gate_codes_kernel"] == 1
    assert launches.counts["coded_rows_product_kernel"] == 4
