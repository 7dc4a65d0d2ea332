"""Predicted bytes of weights and KV against the tensors that an engine really holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime import cleared_memory, kv_budget
from headway_runtime.config import Envelope, Limits, LoraConfig, SpeculativeConfig
from headway_runtime.errors import ConfigError
from headway_runtime.fit.admission import TOLERANCE
from headway_runtime.fit.linear_bytes import Kept, linear_bytes
from headway_runtime.fit.memory_fit import LoadedModel, Question, assess
from headway_runtime.fit.placement import Placement, one_rank, this_processor
from headway_runtime.fit.step_bytes import Step, step_bytes
from headway_runtime.fit.weight_bytes import COMPRESSED, total_bytes, weight_bytes
from headway_runtime.kernels.triton.coded_weight import coded_weight
from headway_runtime.model_config import StoredDtype, read_model_config
from headway_runtime.quantization.choice import choose_quantization


def question(folder: Path, dtype: StoredDtype, **changes: Any) -> Question:
    quantization = choose_quantization(changes.pop("quantization", "auto"), folder)
    fields: dict[str, Any] = {
        "model": LoadedModel(read_model_config(folder), quantization),
        "placement": this_processor(dtype, 2),
        "kv_cache_dtype": "auto",
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "context": 512,
        "num_sequences": 1,
        "memory_bytes": 2**34,
        "overhead_bytes": 0,
    }
    return Question(**fields | changes)


QUANTIZATIONS = ("none", "int8", "int4", "fp8")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_take_what_is_predicted(
    any_shape: str, quantization: str, write_model: Any, start_runner: Any, held_bytes: Any
) -> None:
    folder = write_model(any_shape)
    runner = start_runner(folder, quantization=quantization)
    fit = assess(question(folder, "bfloat16", quantization=quantization))
    assert held_bytes(runner._model) == pytest.approx(fit.weight_bytes, rel=TOLERANCE / 5)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", ["llama, tied", "gemma3"])
def test_weights_in_float32_take_what_is_predicted(
    shape: str, quantization: str, write_model: Any, start_runner: Any, held_bytes: Any
) -> None:
    """A tied head is no copy there, and codes lie as they come."""
    dtype: StoredDtype = "float32"
    folder = write_model(shape, dtype)
    runner = start_runner(folder, quantization=quantization)
    fit = assess(question(folder, dtype, quantization=quantization))
    assert held_bytes(runner._model) == pytest.approx(fit.weight_bytes, rel=TOLERANCE / 5)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_the_kv_cache_holds_as_many_tokens_as_predicted(
    any_shape: str, kv_cache_dtype: str, write_model: Any, start_runner: Any, held_bytes: Any
) -> None:
    folder = write_model(any_shape)
    fit = assess(question(folder, "bfloat16", kv_cache_dtype=kv_cache_dtype))
    runner = start_runner(folder, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=fit.kv_bytes(3, 500))
    assert runner.num_blocks == 3 * 32
    assert held_bytes(runner._cache.data) == fit.kv_bytes(3, 500)


def test_a_draft_takes_weights_and_kv_of_its_own(
    write_model: Any, start_runner: Any, held_bytes: Any
) -> None:
    folder, draft = write_model("llama, untied"), write_model("llama, tied", num_hidden_layers=1)
    loaded = LoadedModel(read_model_config(draft), choose_quantization("auto", draft))
    fit = assess(question(folder, "bfloat16", draft=loaded, num_speculative_tokens=2))
    runner = start_runner(
        folder,
        speculative=SpeculativeConfig("draft_model", str(draft)),
        envelope=Envelope(64, 1024, 2),
        limits=Limits(64, 1024, 2),
        kv_cache_memory_bytes=fit.kv_bytes(2, 512),
    )
    speculator = runner._speculator
    assert speculator is not None
    models = held_bytes((runner._model, speculator._draft_model._model))
    assert models == pytest.approx(fit.weight_bytes, rel=TOLERANCE / 5)
    caches = held_bytes((runner._cache.data, speculator._draft_model._cache.data))
    assert caches == fit.kv_bytes(2, 512)


def test_an_engine_left_to_itself_leaves_its_largest_step_the_memory_that_is_planned(
    write_model: Any, start_runner: Any, held_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine with hardly more memory than a step of 1,024 tokens, whose weights are not counted."""
    folder = write_model("llama, tied", intermediate_size=8192, num_hidden_layers=1)
    fit = assess(question(folder, "bfloat16", max_model_len=2048, context=2048))
    size = int(fit.step.total * 1.1) + fit.weight_bytes
    free = iter([size, size - fit.weight_bytes])
    monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: next(free))
    monkeypatch.setattr(cleared_memory, "num_cleared", lambda: 0)
    runner = start_runner(folder, max_model_len=2048, kv_cache_memory_bytes=None)
    planned = replace(question(folder, "bfloat16", max_model_len=2048, context=2048), memory_bytes=size)
    want = assess(planned).default_kv_bytes
    assert fit.least_kv_bytes <= want < 0.4 * (size - fit.weight_bytes)
    assert held_bytes(runner._cache.data) == pytest.approx(want, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rank", [5, 16])
def test_adapters_take_what_is_predicted(
    any_shape: str, dtype: StoredDtype, rank: int, write_model: Any, start_runner: Any
) -> None:
    folder = write_model(any_shape, dtype)
    runner = start_runner(folder, lora=LoraConfig(3, 7, rank), kv_cache_memory_bytes=None)
    fit = assess(question(folder, dtype, num_adapters=7, adapter_rank=rank))
    assert fit.adapter_bytes == 7 * runner._bank.num_bytes(rank) > 0
    assert fit.total_bytes == assess(question(folder, dtype)).total_bytes + fit.adapter_bytes


W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
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
}


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "int4", id="gptq"
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False},
            "int8",
            id="gptq, 8 bits",
        ),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, "int4", id="awq"
        ),
        pytest.param({"quant_method": "fp8"}, "fp8", id="fp8"),
        pytest.param(W8A8, "int8", id="8-bit weights and inputs"),
    ],
)
def test_quantized_checkpoints_take_what_is_predicted(
    scheme: dict[str, Any], kind: str, write_model: Any, start_runner: Any, held_bytes: Any, tmp_path: Path
) -> None:
    """With weights that are made up as such a checkpoint would hold them."""
    config = json.loads((write_model("llama, untied") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    runner = start_runner(tmp_path, load_format="dummy")
    fit = assess(question(tmp_path, "bfloat16"))
    assert {one.kept_as for one in fit.weights if one.part == "MLP"} == {kind}
    plain = COMPRESSED if this_processor("bfloat16", 2).compresses else "bfloat16"
    assert {one.kept_as for one in fit.weights if one.part == "head"} == {plain}
    assert held_bytes(runner._model) == pytest.approx(fit.weight_bytes, rel=TOLERANCE)


def test_a_router_counts_as_plain_whatever_the_checkpoint_has_it_as(
    write_model: Any, start_runner: Any, held_bytes: Any, tmp_path: Path
) -> None:
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    config = json.loads((write_model("qwen3 moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    runner = start_runner(tmp_path, load_format="dummy")
    fit = assess(question(tmp_path, "bfloat16"))
    kept = {one.part: one.kept_as for one in fit.weights}
    assert (kept["experts"], "int4" in kept["router"]) == ("int4", False)
    assert held_bytes(runner._model) == pytest.approx(fit.weight_bytes, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("scheme", "want"),
    [
        pytest.param({"bits": 4, "group_size": 32, "desc_act": True}, "int4", id="act-order"),
        pytest.param({"bits": 4, "group_size": 16, "desc_act": False}, "bfloat16", id="odd groups"),
        pytest.param(
            {
                "bits": 4,
                "group_size": 32,
                "desc_act": False,
                "dynamic": {r"+:.*experts\.0\..*": {"bits": 8}},
            },
            "bfloat16",
            id="unlike",
        ),
    ],
)
def test_experts_that_a_gpu_multiplies_as_plain_numbers_count_as_such(
    scheme: dict[str, Any], want: str, write_model: Any, tmp_path: Path
) -> None:
    config = json.loads((write_model("qwen3 moe") / "config.json").read_text())
    own = {"quantization_config": {"quant_method": "gptq", "sym": True} | scheme}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    gpu = Placement(is_cpu=False, dtype="bfloat16", num_multiprocessors=132)
    found = assess(question(tmp_path, "bfloat16", placement=gpu)).weights
    experts = [one for one in found if one.part == "experts"]
    assert [one.kept_as for one in experts] == [want]
    if want == "bfloat16":
        assert experts[0].num_bytes == 2 * experts[0].num_weights
    assert {one.kept_as for one in found if one.part == "attention"} == {"int4"}


def test_published_models_have_the_weights_that_they_are_known_to_have(fixture_folder: Any) -> None:
    want = {"llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "qwen3-30b-a3b": 30_532_122_624}
    for name, count in want.items():
        fit = assess(question(fixture_folder(name), "bfloat16"))
        assert sum(one.num_weights for one in fit.weights) == count


def test_ranks_share_heads_and_middles_and_hold_few_kv_heads_several_times(fixture_folder: Any) -> None:
    model = read_model_config(fixture_folder("qwen3-30b-a3b"))
    half, eighth = one_rank(model, 2), one_rank(model, 8)
    assert (half.num_attention_heads, half.num_kv_heads, half.experts and half.experts.size) == (16, 2, 384)
    assert (eighth.num_attention_heads, eighth.num_kv_heads) == (4, 1)
    none = choose_quantization("auto", fixture_folder("qwen3-30b-a3b"))
    whole, share = (
        total_bytes(weight_bytes(one, none, this_processor("bfloat16", 2), 4096)) for one in (model, half)
    )
    assert share == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize("ranks", [3, 64])
def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(ranks: int, fixture_folder: Any) -> None:
    model = read_model_config(fixture_folder("qwen3-30b-a3b"))
    with pytest.raises(
        ConfigError, match=f"tensor_parallel_size={ranks}: the model's num_attention_heads, 32"
    ):
        one_rank(model, ranks)


@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group", [32, 128, 512, 96, 192])
def test_codes_on_a_gpu_take_what_its_layout_does(group: int, has_zeros: bool) -> None:  # noqa: FBT001 - a row of a table
    outputs, inputs = 96, 512 if 512 % group == 0 else 384
    codes = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    scales = torch.full((outputs, inputs // group), 0.5)
    zeros = torch.full_like(scales, 5.0) if has_zeros else None
    packed = coded_weight("int4", [codes], [scales], [zeros])
    assert packed is not None
    kept = Kept("int4", group, has_zeros=has_zeros)
    want = linear_bytes([outputs], inputs, kept, Placement(is_cpu=False, dtype="bfloat16"))
    assert want.total == packed.codes.nbytes + packed.meanings.nbytes


def test_a_gpus_step_turns_all_codes_of_a_projection_into_numbers(fixture_folder: Any) -> None:
    model = read_model_config(fixture_folder("llama-3.2-1b"))
    gpu = Placement(is_cpu=False, dtype="bfloat16")
    step = Step(2048, 8192, 1, 0, 2048)
    plain = step_bytes(model, gpu, step, model.vocab_size)
    coded = step_bytes(model, gpu, replace(step, has_codes=True, is_int4=True), model.vocab_size)
    gate_and_up = 2 * model.hidden_size * 2 * model.intermediate_size
    assert coded.feed_forward - plain.feed_forward == pytest.approx(gate_and_up, rel=0.01)


def test_the_first_of_several_ranks_draws_from_the_whole_vocabulary(fixture_folder: Any) -> None:
    changes = {"placement": Placement(is_cpu=False, dtype="bfloat16"), "max_num_seqs": 512}
    alone, one_of_eight = (
        assess(question(fixture_folder("llama-3.2-1b"), "bfloat16", num_ranks=ranks, **changes)).step
        for ranks in (1, 8)
    )
    assert one_of_eight.sampling == alone.sampling
    assert one_of_eight.kept == alone.kept
    assert one_of_eight.feed_forward < alone.feed_forward


def test_a_step_of_many_prompts_is_as_wide_as_its_tokens(fixture_folder: Any) -> None:
    wide = assess(question(fixture_folder("llama-3.2-1b"), "bfloat16", max_model_len=128, context=128))
    assert wide.step.num_tokens == 1024
    few = assess(
        question(fixture_folder("llama-3.2-1b"), "bfloat16", max_model_len=128, context=128, max_num_seqs=2)
    )
    assert few.step.num_tokens == 256
