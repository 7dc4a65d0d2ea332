"""Two ranks compute what one does: every architecture, KV type, and number of KV heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway_runtime.config import EngineConfig, ParallelConfig
from headway_runtime.errors import ModelLoadError
from headway_runtime.fit.placement import one_rank, this_processor
from headway_runtime.fit.weight_bytes import total_bytes, weight_bytes
from headway_runtime.memory import kv_bytes_per_token
from headway_runtime.model_config import read_model_config
from headway_runtime.models.loader import CheckpointWeights
from headway_runtime.parallel.share import Range
from headway_runtime.quantization.choice import choose_quantization
from headway_runtime.runner import Runner

# Between float32 logits of one model added up in another order.
FLOAT32_TOLERANCE = 3e-4
# Of bfloat16's, whose partial sums are rounded: a few of its steps at logits of some tens.
BFLOAT16_TOLERANCE = 0.06
PROMPT = [3 * number % 320 for number in range(70)]

SHAPES = [
    "llama",
    "llama, gelu",
    "mistral",
    "qwen2",
    "qwen3, tied, biases, windows by layer",
    "gemma2",
    "gemma3, scaled",
    "gemma3 within another model",
    "mixtral",
    "mixtral, window, one tensor for all experts",
    "qwen3 moe",
    "qwen3 moe, some layers dense",
    "qwen3 moe, window, one tensor for all experts",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_one_rank(
    shape: str, checkpoint: Any, engine_config: Any, logits_on_both: Any
) -> None:
    reference = checkpoint(shape)
    want, got = logits_on_both(engine_config(reference.folder), PROMPT)
    torch.testing.assert_close(got, want, atol=FLOAT32_TOLERANCE, rtol=0.0)
    torch.testing.assert_close(got, reference.logits(PROMPT), atol=FLOAT32_TOLERANCE, rtol=0.0)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        pytest.param("llama", {"num_key_value_heads": 1}, id="one KV head, on both ranks"),
        pytest.param("gemma2", {"num_key_value_heads": 1}, id="one KV head, with windows and caps"),
        pytest.param("llama", {"num_key_value_heads": 4}, id="as many KV heads as query heads"),
        pytest.param("qwen2", {"vocab_size": 333, "num_attention_heads": 8}, id="an odd vocabulary"),
        pytest.param("llama", {"vocab_size": 9}, id="a vocabulary that one rank holds all of"),
        pytest.param("llama", {"mlp_bias": True, "attention_bias": True}, id="biases that count once"),
    ],
)
def test_sizes_that_ranks_do_not_divide(
    shape: str, fields: dict[str, Any], checkpoint: Any, engine_config: Any, logits_on_both: Any
) -> None:
    reference = checkpoint(shape, **fields)
    prompt = [one % fields.get("vocab_size", 320) for one in PROMPT]
    want, got = logits_on_both(engine_config(reference.folder), prompt)
    assert got.shape == want.shape == (len(prompt), fields.get("vocab_size", 320))
    torch.testing.assert_close(got, want, atol=FLOAT32_TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("shape", ["llama", "qwen3 moe", "gemma3, scaled"])
def test_bfloat16_logits_are_near(
    shape: str, checkpoint: Any, engine_config: Any, logits_on_both: Any
) -> None:
    reference = checkpoint(shape, "bfloat16")
    want, got = logits_on_both(engine_config(reference.folder), PROMPT)
    exact = reference.logits(PROMPT, exact=True)
    spread = float(exact.std())
    own_error = float((want - exact).abs().mean())
    # Rounded once more for each sum of two: as near to the truth as one rank, or nearly.
    assert float((got - exact).abs().mean()) < 1.5 * own_error + BFLOAT16_TOLERANCE * spread


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_coded_keys_and_values(
    kv_cache_dtype: str, checkpoint: Any, engine_config: Any, logits_on_both: Any
) -> None:
    """A scale is of one head, and no head is cut: the codes are the same."""
    reference = checkpoint("llama")
    config: EngineConfig = engine_config(reference.folder, kv_cache_dtype=kv_cache_dtype)
    want, got = logits_on_both(config, PROMPT)
    assert float((got - want).abs().max()) < 0.05 * float(want.std())
    torch.testing.assert_close(got.mean(), want.mean(), atol=1e-2, rtol=0.0)


def test_made_up_weights_are_parts_of_the_same(
    checkpoint: Any, engine_config: Any, logits_on_both: Any
) -> None:
    reference = checkpoint("qwen3 moe")
    want, got = logits_on_both(engine_config(reference.folder, load_format="dummy", seed=7), PROMPT)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 7], ids=["of the first rank", "of the second"])
def test_a_bias_that_is_not_finite_is_named_by_the_rank_whose_part_it_is_in(
    place: int, value: float, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    bias = torch.zeros(8)
    bias[place] = value
    save_file({name: bias}, tmp_path / "model.safetensors")
    for own in (Range(0, 4), Range(4, 8)):
        weights = CheckpointWeights(tmp_path, torch.float32, torch.device("cpu"))
        if own.first <= place < own.last:
            with pytest.raises(
                ModelLoadError, match=rf"model\.safetensors: tensor '{name}' holds numbers that are infinite"
            ):
                weights.take(name, (8,), own)
        else:
            assert not weights.take(name, (8,), own).any()


def test_each_rank_holds_its_share_alone(pair: Any, checkpoint: Any, engine_config: Any) -> None:
    reference = checkpoint("llama")
    config = engine_config(reference.folder)
    single = Runner(config)
    pair.load(engine_config(reference.folder, parallel=ParallelConfig(size=2)))
    whole: Any = single._model
    own: Any = pair._model
    for want, got in zip(whole.linears, own.linears, strict=True):
        assert want.num_inputs * want.num_outputs == 2 * got.num_inputs * got.num_outputs
    assert 2 * own._embedding.untyped_storage().nbytes() == whole._embedding.untyped_storage().nbytes()
    # Half the KV heads in the same memory: twice the blocks, and perhaps one more.
    assert pair.num_blocks + 1 - 2 * (single.num_blocks + 1) in (0, 1)


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 1}], ids=["KV heads cut", "one KV head"])
def test_a_plan_tells_what_a_rank_holds(
    fields: dict[str, Any], quantization: str, pair: Any, checkpoint: Any, engine_config: Any, held_bytes: Any
) -> None:
    reference = checkpoint("llama", "bfloat16", hidden_size=256, intermediate_size=768, **fields)
    config = engine_config(reference.folder, quantization=quantization, parallel=ParallelConfig(size=2))
    pair.load(config)
    share = one_rank(read_model_config(reference.folder), 2)
    told = weight_bytes(
        share,
        choose_quantization(quantization, reference.folder),
        this_processor("bfloat16", 1),
        config.max_model_len,
    )
    assert held_bytes(pair._model) == pytest.approx(total_bytes(told), rel=0.05)
    # And of its KV cache.
    block = 16 * kv_bytes_per_token(share, "bfloat16")
    assert pair._cache.data.nbytes == (pair.num_blocks + 1) * block
