"""What would help where no live knob does, predicted by the fitted model."""

from typing import Any

import pytest

from headway_operator.samples import Limits
from headway_operator.slo.advice import PARALLEL_SHARE, advice
from headway_operator.slo.build import Build, build_of
from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Workload
from headway_operator.slo.step_fit import StepModel
from headway_operator.spec import parse

LIMITS = Limits(64, 2048)
# All prompts have 1,000 tokens, so a lone one takes base + 1000 * prefill; a lone decode base + 1000 * kv.
WORK = Workload(1000.0, 1e6, 200.0, 1000.0, 0.0)


def told(build: Build, target: float, latency: Any = "ttft", **model: float) -> str:
    times = {"base": 10.0, "prefill": 0.5, "sequence": 0.0, "kv": 0.01, **model}
    return advice(build, Replica(StepModel(**times), WORK, 95.0), LIMITS, latency, target)


def test_the_model_says_what_each_lever_leaves() -> None:
    gpu = Build(quantization="none", has_gpu=True)
    # fp8: 0.66 * 10 + 0.6 * 500; two GPUs: 0.55 * 510. int4 computes prompts in plain numbers.
    assert told(gpu, 320.0) == "fp8 weights or tensorParallelSize 2 would be predicted at 307 / 280 ms"
    # A decode reads weights (10 ms) and KV (30 ms).
    assert told(gpu, 22.0, "tpot", kv=0.03) == (
        "fp8 weights or int4 weights or tensorParallelSize 2 or kvCacheDtype fp8 would be predicted at "
        "37 / 35 / 22 / 38 ms"
    )
    # Of 10 ms of KV, codes leave 9.2, which is not worth a word beside 10 of weights.
    assert told(gpu, 12.0, "tpot") == (
        "fp8 weights or int4 weights or tensorParallelSize 2 would be predicted at 17 / 15 / 11 ms"
    )


def test_where_none_is_enough_alone_it_says_what_all_are_together() -> None:
    gpu = Build(quantization="none", has_gpu=True)
    assert told(gpu, 200.0).endswith("; fp8 weights and tensorParallelSize 2 together, 169 ms, is enough")
    assert told(gpu, 100.0).endswith("together, 169 ms, is not enough either")
    # 5.4 ms of weights, 27.6 ms of KV, and half of both.
    together = "int4 weights and tensorParallelSize 2 and kvCacheDtype fp8 together, 18 ms, is enough"
    assert told(gpu, 20.0, "tpot", kv=0.03).endswith(together)


def test_only_what_is_not_pulled_yet_is_named() -> None:
    pulled = Build(quantization="int4", kv_cache_dtype="fp8", tensor_parallel_size=4, has_gpu=True)
    assert told(pulled, 9.0, "tpot") == (
        f"tensorParallelSize 8 would be predicted at {20 * PARALLEL_SHARE:.0f} ms, which is not enough"
    )
    # Of four-bit weights, fp8 ones compute prompts sooner.
    assert told(pulled, 400.0).startswith("fp8 weights or tensorParallelSize 8 would be predicted at 312 / ")
    most = Build(quantization="fp8", kv_cache_dtype="int8", tensor_parallel_size=64, has_gpu=True)
    assert told(most, 1.0).startswith("no lever of the model is known to help")


def test_on_a_cpu_prompts_gain_nothing_and_decodes_do() -> None:
    assert told(Build(), 100.0).startswith("no lever of the model is known to help")
    words = told(Build(), 8.0, "tpot", kv=0.0)
    assert (
        words
        == "int8 weights or int4 weights would be predicted at 7.1 / 5.2 ms (if weights have 16 bits now)"
    )
    assert told(Build(quantization="compressed-tensors"), 8.0, "tpot", kv=0.0).startswith("no lever")


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, 0),
        ({"device": "cuda"}, 1),
        ({"gpu": {}}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}, "device": "cpu"}, 0),
        ({"resources": {"limits": {"cpu": "4"}}}, 0),
    ],
)
def test_a_gpu_is_there_where_one_is_asked_for(build: Any, spec: dict[str, Any], wanted: int) -> None:
    assert build_of(parse(build.manifest(spec)).spec).has_gpu == wanted


def test_four_bit_formats_are_four_bits(build: Any) -> None:
    found = build_of(parse(build.manifest({"quantization": "awq", "tensorParallelSize": 2})).spec)
    assert (found.quantization, found.tensor_parallel_size) == ("int4", 2)
