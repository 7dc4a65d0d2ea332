"""What a step is predicted to take against what PyTorch allocates in one."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.batch import Batch, Chunk
from headway_runtime.fit.placement import Placement, this_processor
from headway_runtime.fit.product_bytes import plain_product_bytes
from headway_runtime.fit.step_bytes import Step, step_bytes
from headway_runtime.layers import linear
from headway_runtime.model_config import read_model_config
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.request import SamplingParams

WIDE = {"hidden_size": 512, "num_attention_heads": 16, "vocab_size": 8192}


def chunk(start: int, count: int, first_block: int = 1, **sampling: Any) -> Chunk:
    """The last `count` of `start + count` known tokens."""
    end = start + count
    blocks = array("i", range(first_block, first_block + -(-end // 16)))
    tokens = [index % 500 for index in range(end)]
    num_generated = 5 if count == 1 else 0
    sampling = {"temperature": 0.0} | sampling
    return Chunk(
        str(first_block), tokens, start, count, blocks, num_generated, True, SamplingParams(**sampling)
    )


def predicted(folder: Path, step: Step) -> Any:
    model = read_model_config(folder)
    return step_bytes(model, this_processor(model.dtype, 2), step, model.vocab_size)


@pytest.mark.parametrize(
    ("start", "count"),
    [
        pytest.param(0, 512, id="first chunk"),
        pytest.param(512, 512, id="later chunk"),
        pytest.param(1535, 512, id="last chunk"),
    ],
)
@pytest.mark.parametrize(
    ("shape", "dtype", "quantization"),
    [
        ("llama, tied", "bfloat16", "none"),
        ("llama, tied", "float32", "none"),
        ("llama, tied", "float16", "none"),
        ("qwen3", "bfloat16", "int4"),
        ("gemma3", "bfloat16", "none"),
    ],
)
def test_a_prompts_chunk_takes_what_is_predicted(
    shape: str,
    dtype: str,
    quantization: str,
    start: int,
    count: int,
    write_model: Any,
    start_runner: Any,
    peak_bytes: Any,
) -> None:
    folder = write_model(shape, dtype, **WIDE, intermediate_size=1536)
    runner = start_runner(folder, max_model_len=2048, quantization=quantization)
    batch = Batch((chunk(start, count),), 0, count)
    if start:
        runner.execute(batch)  # room for what is gathered is kept
    codes = {"has_codes": quantization != "none", "is_int4": quantization == "int4"}
    want = predicted(folder, Step(count, start + count, 1, 0, count, **codes))
    taken = peak_bytes(lambda: runner.execute(batch))
    if this_processor(dtype, 2).multiplies_halves:  # type: ignore[arg-type]
        # Predicted is what oneDNN's threads copy at most; narrow models have them copy less.
        assert 0.75 * want.peak < taken < 1.02 * want.peak
    else:
        assert taken == pytest.approx(want.peak, rel=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_several_prompts_of_one_step_take_what_is_predicted(
    dtype: str, write_model: Any, start_runner: Any, peak_bytes: Any
) -> None:
    folder = write_model("llama, tied", dtype, **WIDE, intermediate_size=1536)
    runner = start_runner(folder, max_model_len=128)
    chunks = tuple(chunk(0, 127, 1 + 8 * index) for index in range(8))
    want = predicted(folder, Step(8 * 127, 127, 8, 0, 127))
    batch = Batch(chunks, 0, 8 * 127)
    assert peak_bytes(lambda: runner.execute(batch)) == pytest.approx(want.peak, rel=0.05)


def test_a_wide_middle_is_the_peak_of_its_step(write_model: Any, start_runner: Any, peak_bytes: Any) -> None:
    folder = write_model("llama, tied", **WIDE, intermediate_size=16384)
    runner = start_runner(folder, max_model_len=2048)
    want = predicted(folder, Step(512, 512, 1, 0, 512))
    assert want.stage == "feed-forward"
    batch = Batch((chunk(0, 512),), 0, 512)
    assert peak_bytes(lambda: runner.execute(batch)) == pytest.approx(want.peak, rel=0.05)


def test_a_full_batchs_logits_take_no_more_than_predicted(
    write_model: Any, start_runner: Any, peak_bytes: Any
) -> None:
    folder = write_model("llama, tied", **WIDE)
    runner = start_runner(folder, max_model_len=2048)
    dear = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "presence_penalty": 0.5}
    batch = Batch(tuple(chunk(40, 1, 1 + 3 * index, **dear) for index in range(64)), 64, 64)
    want = predicted(folder, Step(64, 41, 64, 64 * 41, 1))
    assert want.stage == "logits and sampling"
    runner.execute(batch)
    # How often a draw is tried again, on copies, is a matter of luck.
    assert 0.75 * want.peak < peak_bytes(lambda: runner.execute(batch)) < 1.05 * want.peak


def test_experts_take_no_more_than_predicted(write_model: Any, start_runner: Any, peak_bytes: Any) -> None:
    """Predicted is the worst: all tokens to the same experts."""
    folder = write_model("qwen3 moe", **WIDE, moe_intermediate_size=2048)
    runner = start_runner(folder, max_model_len=2048)
    want = predicted(folder, Step(512, 512, 1, 0, 512))
    assert want.stage == "feed-forward"
    batch = Batch((chunk(0, 512),), 0, 512)
    assert peak_bytes(lambda: runner.execute(batch)) < 1.02 * want.peak


INTEGERS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INTEGERS | {"strategy": "channel"},
            "input_activations": INTEGERS | {"strategy": "token", "dynamic": True},
        }
    },
}


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            "bfloat16",
            marks=pytest.mark.skipif(
                not this_processor("bfloat16", 2).has_integer_products,
                reason="what PyTorch's products of W8A8 in bfloat16 take is not predicted (docs/plan.md)",
            ),
        ),
        "float32",
    ],
)
@pytest.mark.parametrize("size", [1536, 6144], ids=["attention", "a wide middle"])
def test_inputs_that_are_quantized_too_are_counted(
    dtype: str, size: int, write_model: Any, start_runner: Any, peak_bytes: Any, tmp_path: Path
) -> None:
    """In float32 by PyTorch's operators, in bfloat16 by a kernel where there is one."""
    written = write_model("llama, tied", dtype, **WIDE, intermediate_size=size)
    config = json.loads((written / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))
    runner = start_runner(tmp_path, max_model_len=2048, load_format="dummy")
    assert choose_quantization("auto", tmp_path).has_integer_inputs
    step = Step(512, 512, 1, 0, 512, has_codes=True, has_integer_inputs=True)
    want = predicted(tmp_path, step)
    assert want.stage == ("feed-forward" if size > 1536 else "attention")
    batch = Batch((chunk(0, 512),), 0, 512)
    assert peak_bytes(lambda: runner.execute(batch)) == pytest.approx(want.peak, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "halves", "widened"),
    [
        # Two threads: 16 rows and 64 of the weight in 2 bytes, sums in 4, and what lies between.
        pytest.param(
            16,
            512,
            500,
            2 * (2 * 512 * (16 + 64) + 4 * 16 * 512 + 65536),
            4 * (2**19 + 16 * (512 + 500)),
            id="few of all",
        ),
        pytest.param(
            1000,
            4096,
            8192,
            2 * (2 * 2048 * (256 + 64) + 4 * 256 * 1024 + 65536),
            4 * (2**19 + 1000 * (4096 + 128)),
            id="more than is copied at once",
        ),
    ],
)
def test_what_a_plain_product_takes(rows: int, inputs: int, outputs: int, halves: int, widened: int) -> None:
    size = rows, inputs, outputs
    assert plain_product_bytes(Placement(True, "float16", num_threads=2), *size) == 0
    copying = Placement(True, "float16", num_threads=2, multiplies_halves=True)
    assert plain_product_bytes(copying, *size) == halves
    assert plain_product_bytes(Placement(True, "float16", num_threads=2, widens=True), *size) == widened


@pytest.fixture(params=["as this processor does", "widened"])
def halves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How float16 is multiplied: many processors have no products of it, and widen; any can."""
    if request.param == "widened":
        monkeypatch.setattr("headway_runtime.kernels.cpu.processor.multiplies_halves", lambda: False)
    linear._has_halves.cache_clear()
    yield
    linear._has_halves.cache_clear()


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("rows", [16, 64, 200, 1024])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(512, 512), (896, 1152), (1024, 4096), (2048, 2048), (3000, 1000), (4096, 6144)]
)
def test_no_product_of_halves_takes_more_than_predicted(
    inputs: int, outputs: int, rows: int, num_threads: int, peak_bytes: Any
) -> None:
    x, weight = (torch.randn(size, inputs, dtype=torch.float16) for size in (rows, outputs))
    placement = this_processor("float16", num_threads)
    assert placement.multiplies_halves != placement.widens
    want = plain_product_bytes(placement, rows, inputs, outputs)
    layer = linear.make_linear([weight])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        taken = peak_bytes(lambda: layer(x)) - 2 * rows * outputs
    finally:
        torch.set_num_threads(before)
    assert 0 < taken <= want
    if num_threads == 1 and rows >= 256 and inputs >= 2048 and outputs >= 1024:
        assert taken > 0.85 * want, "one thread takes all that it may"
