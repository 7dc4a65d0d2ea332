"""How many launches a recorded decode step is: what a batch of one waits for besides its bytes."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.graphs.forms import StepForm
from headway_runtime.graphs.recording import RecordedWork

MOST_PER_LAYER = 9
# place_step, embedding, cosines, sines; the last sum, norm and head; numbers of blocks, draw.
MOST_BESIDE_LAYERS = 10


@pytest.fixture
def recorded(start: Callable[..., Any], write_model: Callable[..., Path]) -> Callable[..., RecordedWork]:
    """The step of one sequence, of a model of that many layers."""

    def make(num_layers: int, shape: dict[str, Any], **changes: Any) -> RecordedWork:
        driver = start(write_model(num_hidden_layers=num_layers, **shape), cuda_graph_sizes=(1,), **changes)
        work: RecordedWork = driver.graphs._graphs[StepForm(1)].graph
        return work

    return make


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
WIDE = {"hidden_size": 128, "intermediate_size": 128}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize(
    ("shape", "changes", "most"),
    [
        ({}, {"dtype": "bfloat16"}, MOST_PER_LAYER),
        (QWEN3, {"dtype": "bfloat16"}, MOST_PER_LAYER),
        (QWEN3, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, MOST_PER_LAYER),
        (WIDE, {"dtype": "bfloat16", "quantization": "int4"}, MOST_PER_LAYER),
        (WIDE, {"dtype": "bfloat16", "quantization": "fp8"}, MOST_PER_LAYER),
        (MIXTURE, {"dtype": "bfloat16"}, 12),
    ],
    ids=["llama", "qwen3", "qwen3 int8 kv", "int4", "fp8", "mixture"],
)
def test_launches_of_a_decoder_layer(
    shape: dict[str, Any], changes: dict[str, Any], most: int, recorded: Callable[..., RecordedWork]
) -> None:
    short, long = (recorded(count, shape, **changes).launches for count in (1, 2))

    own = Counter(one.name for one in long) - Counter(one.name for one in short)
    print(f"a layer: {own.total()} launches {dict(own)}; beside layers: {len(short) - own.total()}")
    assert 0 < own.total() <= most
    assert len(short) - own.total() <= MOST_BESIDE_LAYERS


def test_a_step_is_kernels_of_ours_and_products(recorded: Callable[..., RecordedWork]) -> None:
    launches = recorded(2, QWEN3, dtype="bfloat16").launches

    operators = Counter(one.name.split(".")[1] for one in launches if not one.is_kernel)
    kernels = {one.name for one in launches if one.is_kernel}
    assert set(operators) <= {"linear", "mm", "addmm", "index_select", "add_", "t"}
    assert {"place_step_kernel", "paged_decode_kernel", "rotate_and_store_kernel", "draw_kernel"} <= kernels
