"""Rotary scalings: the arithmetic against transformers', and how they are spelled in config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway_runtime.errors import ModelLoadError
from headway_runtime.layers.rotary import RotaryTable, attention_factor, inverse_frequencies
from headway_runtime.model_config import read_model_config
from headway_runtime.model_config_rope import DynamicRope, LinearRope, ProportionalRope, Rope, YarnRope

HEAD_DIM, LENGTH = 32, 2048
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
SHORT = [1.0 + index / 16 for index in range(HEAD_DIM // 2)]
LONG = [1.0 + index for index in range(HEAD_DIM // 2)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "dynamic, large base": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 5e6},
    "yarn": YARN,
    "yarn, own attention factor": YARN | {"attention_factor": 1.3},
    "yarn, mscale alone": YARN | {"mscale": 0.7},
    "yarn, both mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 1.1},
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 2.5},
    "yarn, ramp of no width": YARN | {"beta_fast": 4, "beta_slow": 4, "truncate": False},
    "yarn, zeros for defaults": YARN | {"beta_fast": 0, "beta_slow": 0, "mscale": 0, "mscale_all_dim": 0},
    "yarn, factor by lengths": YARN | {"factor": None, "original_max_position_embeddings": 300},
    "yarn, no stretching": YARN | {"factor": 1.0},
    "yarn, original is the whole": {"rope_type": "yarn", "factor": 2.0},
    "longrope": LONGROPE | {"original_max_position_embeddings": 512},
    "longrope, factor told": LONGROPE | {"original_max_position_embeddings": 512, "factor": 6.0},
    "longrope, attention told": LONGROPE | {"original_max_position_embeddings": 512, "attention_factor": 1.5},
    "longrope, not long": LONGROPE | {"original_max_position_embeddings": 4096},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 256, "rope_theta": 5e5},
    "llama3, original is the whole": LLAMA3,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    "proportional, whole": {"rope_type": "proportional"},
}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(SIZES | fields))
    return folder


def references(config: Any, scaling: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of transformers for sequences of that length."""
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=length)
    return frequencies, factor


@pytest.mark.parametrize("length", [256, 1024, LENGTH, 5000])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_frequencies_equal_those_of_transformers(name: str, length: int, tmp_path: Path) -> None:
    scaling = {"rope_theta": 1e4} | SCALINGS[name]
    config: Any = LlamaConfig(**SIZES | {"rope_parameters": dict(scaling)})
    want, want_factor = references(config, scaling, length)
    (rope,) = read_model_config(write(tmp_path, rope_parameters=scaling)).ropes
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM, length), want, rtol=1e-6, atol=1e-12)
    assert attention_factor(rope) == pytest.approx(want_factor, rel=1e-12)
    table = RotaryTable(rope, HEAD_DIM, 64, torch.float32, torch.device("cpu"))
    assert table.cosine[0].tolist() == pytest.approx([want_factor] * HEAD_DIM)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_spelling_mean_the_same(name: str, tmp_path: Path) -> None:
    scaling = dict(SCALINGS[name])
    theta = scaling.pop("rope_theta", 2e4)
    new = read_model_config(write(tmp_path, rope_parameters=scaling | {"rope_theta": theta})).ropes
    old_kind = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    for spelling in (scaling, old_kind):
        folder = write(tmp_path, rope_scaling=spelling, rope_theta=theta)
        assert read_model_config(folder).ropes == new
        both = write(tmp_path, rope_scaling=spelling, rope_theta=theta, rope_parameters={"rope_type": "none"})
        assert read_model_config(both).ropes == new
    assert new[0].theta == theta


def test_length_before_scaling_beside_the_rotary_fields_has_priority(tmp_path: Path) -> None:
    folder = write(tmp_path, rope_parameters=YARN, original_max_position_embeddings=100)
    beside: dict[str, Any] = {"original_max_position_embeddings": 100}
    config: Any = LlamaConfig(**SIZES, rope_parameters=dict(YARN), **beside)
    (rope,) = read_model_config(folder).ropes
    assert isinstance(rope.scaling, YarnRope)
    assert rope.scaling.original_max_position_embeddings == 100
    want, _ = references(config, YARN, LENGTH)
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM, LENGTH), want)


def test_part_that_turns_is_read_beside_the_rotary_fields_too(tmp_path: Path) -> None:
    folder = write(tmp_path, rope_scaling={"rope_type": "proportional"}, partial_rotary_factor=0.5)
    assert read_model_config(folder).ropes == (Rope(1e4, ProportionalRope(1.0, 8)),)


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        (None, LENGTH),
        ({"rope_type": "linear", "factor": 3.0}, 3 * LENGTH),
        ({"rope_type": "dynamic", "factor": 3.0}, 3 * LENGTH),
        (YARN, LENGTH),
        (YARN | {"original_max_position_embeddings": LENGTH}, 4 * LENGTH),
        (LLAMA3, LENGTH),
        (LONGROPE | {"original_max_position_embeddings": 64}, LENGTH),
    ],
)
def test_longest_context_counts_what_scaling_adds(scaling: Any, want: int, tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, rope_parameters=scaling)).longest_context == want


def test_gemma3_has_a_rotation_for_each_kind_of_layer(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]}
    linear = {"rope_type": "linear", "factor": 8.0}
    new = {
        "full_attention": linear | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    }
    want = (Rope(5e5, LinearRope(8.0)), Rope(3e3, None))
    config = read_model_config(write(tmp_path, **gemma, rope_parameters=new))
    assert config.ropes == want
    assert [layer.rope for layer in config.layers] == [1, 0]
    old = {"rope_scaling": linear, "rope_theta": 5e5, "rope_local_base_freq": 3e3}
    assert read_model_config(write(tmp_path, **gemma, **old)).ropes == want
    reference: Any = Gemma3TextConfig(**SIZES | {"layer_types": gemma["layer_types"]} | old)
    assert reference.rope_parameters == new
    assert read_model_config(write(tmp_path, **gemma)).ropes == (Rope(1e6, None), Rope(1e4, None))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"rope_parameters": {"rope_type": "su"}},
            "rope_parameters: rope_type='su': supported are 'default'",
        ),
        ({"rope_scaling": {"type": "ntk"}}, "config.json: rope_scaling: type='ntk'"),
        ({"rope_parameters": {"mrope_section": [8, 4, 4]}}, "rope_parameters: mrope_section=[8, 4, 4]"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5: these architectures",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_parameters: factor=None: want a positive number",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}}, "factor=0.5: want at least 1"),
        ({"rope_parameters": YARN | {"truncate": "no"}}, "truncate='no': want true or false"),
        ({"rope_parameters": YARN | {"attention_factor": -1.0}}, "attention_factor=-1.0"),
        ({"rope_parameters": YARN | {"mscale": "x"}}, "mscale='x'"),
        (
            {"rope_parameters": LONGROPE | {"short_factor": [1.0]}},
            "short_factor=[1.0]: want 16 positive numbers",
        ),
        ({"rope_parameters": LONGROPE | {"long_factor": None}}, "long_factor=None: want 16"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0"),
        ({"rope_theta": "high"}, "rope_theta='high'"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention={}"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_type": "linear"}},
            "rope_parameters: rope_type='linear': want one object each",
        ),
    ],
)
def test_rotation_that_is_not_understood_is_refused(
    fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_model_config(write(tmp_path, **fields))
    assert complaint in str(caught.value)


def test_dynamic_scaling_is_none_up_to_the_original_length() -> None:
    rope = Rope(1e4, DynamicRope(4.0, 512))
    assert torch.equal(inverse_frequencies(rope, 16, 512), inverse_frequencies(Rope(1e4, None), 16, 512))


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        pytest.param({"rope_type": "dynamic", "factor": 4.0}, 64, id="dynamic"),
        pytest.param(
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + index for index in range(8)],
                "original_max_position_embeddings": 64,
            },
            256,
            id="longrope",
        ),
    ],
)
def test_sequences_as_long_as_they_may_become_equal_the_reference(
    rope: dict[str, Any], length: int, checkpoint: Any, start_engine: Any, random_prompts: Any
) -> None:
    """There both count the same length; shorter ones the reference would rotate otherwise."""
    reference = checkpoint("llama", rope_parameters=rope, max_position_embeddings=length)
    driver = start_engine(reference.folder, max_model_len=256)
    (prompt,) = random_prompts(3, [255])
    driver.add("a", prompt, max_tokens=1, num_prompt_logprobs=1)
    driver.run()
    want = reference.logits(prompt + driver.tokens("a")).log_softmax(-1)
    told = [one for output in driver.outputs["a"] for one in output.prompt_logprobs or ()]
    got = torch.tensor([one.chosen for one in told if one is not None])
    following = torch.tensor(prompt[1:]).unsqueeze(1)
    torch.testing.assert_close(got, want[:254].gather(1, following).squeeze(1), atol=3e-4, rtol=0.0)
