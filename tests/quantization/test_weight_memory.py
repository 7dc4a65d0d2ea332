"""What is said of a model's weights before they are loaded is what they then take."""

import subprocess
import sys
from typing import Any

import pytest
from benchmarks.cpu.tensor_bytes import tensor_bytes

from headway_runtime.head_start import weights_are_compressed
from headway_runtime.layers import cpu_kernels
from headway_runtime.layers.linear import can_pack
from headway_runtime.model_config import read_model_config
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.weight_memory import linear_shapes, weight_bytes

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512, "head_dim": 128}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel"},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
TOLERANCE = 0.01


@pytest.mark.parametrize("products", ["with products of our own", "with PyTorch's"])
@pytest.mark.parametrize("wanted", ["none", "int8", "int4", "fp8", "gptq", "block fp8", "w8a8"])
@pytest.mark.parametrize("head", ["own head", "tied head"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_of_weights_are_within_a_percent_of_what_is_allocated(
    products: str,
    wanted: str,
    head: str,
    dtype: str,
    write_checkpoint: Any,
    packers: Any,
    start_runner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_products = products == "with products of our own"
    if not has_products:
        monkeypatch.setattr(cpu_kernels, "multiplies_codes", lambda: False)
    elif not cpu_kernels.multiplies_codes():
        pytest.skip("this processor has no products of codes")
    stored = {
        "gptq": (GPTQ, packers["gptq"](128, has_zeros=True, has_order=True, least_zero=1)),
        "block fp8": (FP8, packers["float8"]("block")),
        "w8a8": (W8A8, packers["integers"]("channel")),
    }
    config, pack = stored.get(wanted, (None, packers["plain"]()))
    written = write_checkpoint(config, pack, **SIZES, tie_word_embeddings=head == "tied head")
    flag = "auto" if wanted in stored else wanted
    runner = start_runner(written.folder, dtype=dtype, quantization=flag)
    model = read_model_config(written.folder)
    want = tensor_bytes(runner._model) - tensor_bytes(runner._model._rotaries)
    got = weight_bytes(
        model,
        choose_quantization(flag, written.folder),
        dtype,
        has_code_products=has_products,
        packs_plain=dtype == "bfloat16" and can_pack(),
        compresses=weights_are_compressed(),
    )
    assert abs(got - want) <= TOLERANCE * want, (got, want)


def test_linear_layers_are_those_of_the_checkpoint(write_checkpoint: Any, packers: Any) -> None:
    written = write_checkpoint(None, packers["plain"]())
    got = {one.module: (one.outputs, one.inputs) for one in linear_shapes(read_model_config(written.folder))}
    assert got == {name: weight.shape for name, weight in written.weights.items()}


def test_arithmetic_needs_no_torch() -> None:
    program = (
        "import sys; import headway_runtime.weight_memory, headway_runtime.quantization.choice; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], timeout=240, check=True)
