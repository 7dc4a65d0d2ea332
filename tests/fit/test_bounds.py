"""Bounds of a GPU's speed are no more than what the engine really has to read and compute."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.fit.bounds import FP8_BLOCK, FP8_CAPABILITY, bounds, step_costs
from headway_runtime.fit.gpu_kinds import GPU_KINDS, gpu_placement
from headway_runtime.fit.memory_fit import Fit, LoadedModel, Question, assess
from headway_runtime.kernels.triton import coded_rows, coded_rows_product
from headway_runtime.model_config import StoredDtype, read_model_config
from headway_runtime.quantization.choice import choose_quantization

LAYERS, WINDOWED, WINDOW = 62, 52, 1024
KV_OF_LAYER = 2 * 16 * 128 * 2


def assessed(
    folder: Path,
    kind: str = "h200",
    context: int = 32768,
    dtype: StoredDtype = "bfloat16",
    quantization: str = "auto",
) -> Fit:
    model = LoadedModel(read_model_config(folder), choose_quantization(quantization, folder))
    return assess(
        Question(
            model=model,
            placement=gpu_placement(dtype, GPU_KINDS[kind]),
            kv_cache_dtype="auto",
            max_model_len=context,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            context=context,
            num_sequences=1,
            memory_bytes=GPU_KINDS[kind].memory_bytes,
            overhead_bytes=0,
        )
    )


@pytest.mark.parametrize("context", [512, 32768])
def test_a_decode_reads_of_layers_with_a_window_no_more_than_that(context: int, fixture_folder: Any) -> None:
    """Gemma 3 27B: five layers of six see 1,024 tokens, whatever lies before them."""
    fit = assessed(fixture_folder("gemma-3-27b"), context=context)
    assert sum(one.window == WINDOW for one in fit.model.layers) == WINDOWED
    alone, together = (bounds(fit, GPU_KINDS["h200"], count) for count in (1, 32))
    read = KV_OF_LAYER * (WINDOWED * min(context, WINDOW) + (LAYERS - WINDOWED) * context)
    assert together.decode_bytes - alone.decode_bytes == 31 * read
    if context == 32768:
        # With all of each context 14.7 and 122 ms.
        assert alone.tpot_seconds == pytest.approx(11.9e-3, rel=0.01)
        assert together.tpot_seconds == pytest.approx(32.1e-3, rel=0.01)


def test_costs_of_a_context_are_of_what_layers_with_a_window_see(fixture_folder: Any) -> None:
    context, kind = 32768, GPU_KINDS["h200"]
    costs = step_costs(assessed(fixture_folder("gemma-3-27b")), kind, 16)
    read = KV_OF_LAYER * (WINDOWED * WINDOW + (LAYERS - WINDOWED) * context)
    assert costs.decode_token * context * kind.bytes_per_second == pytest.approx(read)
    whole = context * (context + 1) // 2
    short = WINDOW * (WINDOW + 1) // 2 + (context - WINDOW) * WINDOW
    pairs = WINDOWED * short + (LAYERS - WINDOWED) * whole
    assert costs.prefill_pair * whole * kind.flops == pytest.approx(4 * 32 * 128 * pairs)


FLOATS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INTEGERS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
PER_TOKEN = {"strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    format_name = "float-quantized" if weights["type"] == "float" else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FP8 = compressed(FLOATS | {"strategy": "channel"}, FLOATS | PER_TOKEN)
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
W8A8 = compressed(INTEGERS | {"strategy": "channel"}, INTEGERS | PER_TOKEN)
W8A16 = compressed(INTEGERS | {"strategy": "channel"})


@pytest.mark.parametrize(
    ("kind", "stored", "dtype", "want"),
    [
        pytest.param("h100-80g", FP8, "bfloat16", "fp8", id="compressed-tensors fp8"),
        pytest.param("h100-80g", FP8, "float16", "plain", id="fp8 per output, not in bfloat16"),
        pytest.param("h100-80g", FP8_BLOCKS, "float16", "fp8", id="fp8 in blocks"),
        pytest.param("l4", FP8, "bfloat16", "plain", id="fp8 below 9.0 becomes plain numbers"),
        pytest.param("l4", FP8_BLOCKS, "bfloat16", "plain", id="blocks of fp8 below 9.0, too"),
        pytest.param("rtx4090", W8A8, "bfloat16", "int8", id="W8A8 from 8.0 on"),
        pytest.param("a100-80g", W8A8, "bfloat16", "int8", id="W8A8 where there is no fp8"),
        pytest.param("t4", W8A8, "float16", "plain", id="W8A8 without kernels"),
        pytest.param("a100-80g", W8A16, "bfloat16", "plain", id="int8 with plain inputs"),
        pytest.param("h100-80g", None, "bfloat16", "plain", id="plain"),
    ],
)
def test_flops_are_those_of_the_products_that_the_engine_makes(
    kind: str, stored: Any, dtype: StoredDtype, want: str, fixture_folder: Any, tmp_path: Path
) -> None:
    config = json.loads((fixture_folder("llama-3.1-8b") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    gpu = GPU_KINDS[kind]
    flops = {"fp8": gpu.fp8_flops, "int8": gpu.int8_flops, "plain": gpu.flops}[want]
    found = bounds(assessed(tmp_path, kind, 8192, dtype), gpu, 1)
    assert flops is not None
    assert found.ttft_seconds == pytest.approx(found.prefill_flops / flops)


def test_a_gpu_of_whose_codes_nothing_is_told_multiplies_plain_numbers(fixture_folder: Any) -> None:
    told = replace(GPU_KINDS["h100-80g"], fp8_flops=None, int8_flops=None)
    found = bounds(assessed(fixture_folder("llama-3.1-8b"), "h100-80g", 8192, quantization="fp8"), told, 1)
    assert found.ttft_seconds == pytest.approx(found.prefill_flops / told.flops)


def test_which_codes_are_multiplied_is_the_kernels_word() -> None:
    assert coded_rows_product.FP8_CAPABILITY == FP8_CAPABILITY
    assert (coded_rows.GROUP, coded_rows.GROUP) == FP8_BLOCK
