"""Bytes and operations of kernels, against numbers worked out by hand, and of whole models."""

import pytest
from benchmarks.gpu import costs
from benchmarks.gpu.costs import Ceilings, Cost, model_shape
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B

LLAMA, QWEN, MIXTURE = (model_shape(one) for one in (LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B))


@pytest.mark.parametrize(
    ("model", "billions"), [(LLAMA, 8.03), (QWEN, 8.19), (MIXTURE, 30.5)], ids=["llama", "qwen3", "mixture"]
)
def test_shapes_have_as_many_weights_as_the_models_names_say(
    model: costs.ModelShape, billions: float
) -> None:
    plain = sum(outputs * inputs for outputs, inputs in model.projections.values())
    total = model.num_layers * (plain + model.num_experts * model.expert_weights)
    total += 2 * model.vocab_size * model.hidden

    assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_product_moves_its_weight_and_computes_each_pair() -> None:
    plain = costs.product(1, 28672, 4096)
    coded = costs.product(1, 28672, 4096, bits=costs.WEIGHT_BITS["int4"], is_gated=True)

    assert plain.num_bytes == 2 * (28672 * 4096 + 4096 + 28672)
    assert plain.operations == 2 * 28672 * 4096
    # 58.7 MB of codes, 3.7 MB of scales and zero points.
    assert coded.num_bytes == pytest.approx(62.4e6, rel=0.001)


def test_attention_reads_each_key_and_value_once() -> None:
    found = costs.attention(LLAMA, [(1, 8192)] * 32, "bfloat16")
    coded = costs.attention(LLAMA, [(1, 8192)] * 32, "fp8")

    assert found.num_bytes == pytest.approx(32 * 8192 * 2 * 8 * 128 * 2, rel=0.001)
    assert coded.num_bytes == pytest.approx(found.num_bytes * (128 + 4) / 256, rel=0.001)
    assert found.operations == 4 * 32 * 8192 * 32 * 128


def test_a_chunk_sees_what_came_before_it_and_itself_so_far() -> None:
    """3 rows of 5: they see 3, 4 and 5 tokens."""
    assert costs.attention(LLAMA, [(3, 5)], "bfloat16").operations == 4 * 32 * 128 * (3 + 4 + 5)


@pytest.mark.parametrize(("rows", "want"), [(1, 8.0), (10**6, 128.0)])
def test_many_rows_meet_all_experts(rows: int, want: float) -> None:
    assert costs.experts_met(rows, 128, 8) == pytest.approx(want)
    assert costs.experts_met(rows, 0, 0) == 0


def test_a_decode_step_reads_weights_once_and_the_kv_of_all() -> None:
    """15.0 GB of an 8B model but for its embedding; 131,072 bytes a token of KV."""
    one, many = costs.decode_step(LLAMA, 1, 512), costs.decode_step(LLAMA, 32, 512)

    assert one.num_bytes == pytest.approx(15.0e9 + 512 * 131072, rel=0.002)
    assert many.num_bytes - one.num_bytes == pytest.approx(31 * 512 * 131072, rel=0.05)
    assert many.operations == pytest.approx(32 * one.operations)


def test_fewer_bits_of_a_weight_are_fewer_bytes_of_a_step() -> None:
    sizes = [costs.decode_step(LLAMA, 1, 512, form).num_bytes for form in ("none", "fp8", "int4")]

    assert sizes[0] / sizes[1] == pytest.approx(2.0, rel=0.02)
    assert sizes[0] / sizes[2] == pytest.approx(3.5, rel=0.05)


def test_a_prompt_computes_the_head_for_its_last_token_only() -> None:
    found = costs.prompt(LLAMA, 2048)

    products = 2 * 2048 * 32 * LLAMA.weights_of_token + 2 * 128256 * 4096
    assert found.operations == pytest.approx(products + 32 * 4 * 32 * 128 * 2048 * 2049 / 2)
    # As much time of a GPU whose 8-bit rate is twice the other one: half the products', all of attention's.
    ceilings = Ceilings(1e15, 1e12, 2e12)
    attended = 32 * 4 * 32 * 128 * 2048 * 2049 / 2
    assert costs.prompt(LLAMA, 2048, "fp8").operation_seconds(ceilings) == pytest.approx(
        products / 2e12 + attended / 1e12
    )


def test_the_floor_is_the_longer_of_two_times() -> None:
    ceilings = Ceilings(bytes_per_second=100.0, bfloat16_per_second=1000.0, float8_per_second=2000.0)

    assert Cost(50.0, 100.0).floor_seconds(ceilings) == 0.5
    assert Cost(50.0, 1000.0).floor_seconds(ceilings) == 1.0
    assert Cost(50.0, 4000.0, "float8").floor_seconds(ceilings) == 2.0
    # A GPU without whole numbers of 8 bits multiplies them as bfloat16.
    assert Cost(50.0, 4000.0, "int8").floor_seconds(ceilings) == 4.0
