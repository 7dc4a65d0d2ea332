"""The bundled model at every lever passes with the default thresholds; broken scales do not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway_eval.options import parse_options
from headway_eval.verdict import DEFAULTS, DEFAULTS_FOUR_BITS
from headway_runtime.sources import BUNDLED_FOLDER

pytestmark = pytest.mark.long
MODEL = "bundled://headway-tiny"


@pytest.mark.parametrize(
    ("flags", "largest_kl"),
    [
        pytest.param(("--quantization", "fp8"), 2e-3, id="fp8 weights"),
        pytest.param(("--quantization", "int8"), 1e-3, id="int8 weights"),
        pytest.param(("--quantization", "int4"), 2e-2, id="int4 weights"),
        pytest.param(("--kv-cache-dtype", "fp8"), 1e-3, id="fp8 KV"),
        pytest.param(("--kv-cache-dtype", "int8"), 1e-3, id="int8 KV"),
    ],
)
def test_a_lever_passes(run_eval: Callable[..., Any], flags: tuple[str, ...], largest_kl: float) -> None:
    judged = run_eval(MODEL, *flags)
    assert (judged.status, judged.failed_checks) == (0, [])
    # It shows, and it is small.
    assert 1e-5 < judged.report["text"]["mean_kl"] < largest_kl
    assert abs(judged.report["text"]["perplexity_increase"]) < 0.01
    (suite,) = judged.report["tasks"]
    assert suite["baseline_accuracy"] > 0.9
    assert "verdict: passed" in judged.stdout


@pytest.fixture
def asking_for_fp8_kv(tmp_path: Path) -> Path:
    """The bundled model as a plain checkpoint that asks for a KV cache of 8-bit floats."""
    folder = tmp_path / "asking"
    shutil.copytree(BUNDLED_FOLDER / "headway-tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_kv_cache_that_the_checkpoint_asks_for_is_not_held_against_itself(
    run_eval: Callable[..., Any], asking_for_fp8_kv: Path
) -> None:
    judged = run_eval(str(asking_for_fp8_kv), "--tasks", "none")
    kept = [judged.report[side]["kv_cache_dtype"] for side in ("model", "baseline")]
    assert (judged.status, kept) == (0, ["fp8_e4m3", "bfloat16"])
    assert 1e-5 < judged.report["text"]["mean_kl"] < 1e-3


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        pytest.param((), "bfloat16", id="as it computes"),
        pytest.param(("--baseline-dtype", "float16"), "float16", id="as it computes in another dtype"),
        pytest.param(("--kv-cache-dtype", "int8"), "bfloat16", id="beside a lever of the user's"),
        pytest.param(("--baseline-kv-cache-dtype", "int8"), "int8", id="as it is told"),
        pytest.param(("--baseline-kv-cache-dtype", "auto"), "fp8_e4m3", id="told to follow the checkpoint"),
    ],
)
def test_the_baselines_kv_cache_is_as_it_computes_unless_told(
    asking_for_fp8_kv: Path, flags: tuple[str, ...], want: str
) -> None:
    options = parse_options([str(asking_for_fp8_kv), *flags])
    assert options.baseline.levers()["kv_cache_dtype"] == want


def test_speculation_quantized_weights_and_kv_together_pass(run_eval: Callable[..., Any]) -> None:
    draft = '{"model": "bundled://headway-tiny-draft"}'
    levers = ("--quantization", "int8", "--kv-cache-dtype", "fp8", "--speculative-config", draft)
    judged = run_eval(MODEL, *levers)
    assert (judged.status, judged.failed_checks) == (0, [])
    assert judged.report["model"] == {
        "source": MODEL,
        "dtype": "bfloat16",
        "quantization": "int8",
        "kv_cache_dtype": "fp8_e4m3",
        "speculation": draft,
    }
    assert judged.report["baseline"] == {
        "source": MODEL,
        "dtype": "bfloat16",
        "quantization": "none",
        "kv_cache_dtype": "bfloat16",
        "speculation": "off",
    }


def test_scoring_text_takes_no_memory_for_offloaded_prefixes(
    run_eval: Callable[..., Any], tmp_path: Path
) -> None:
    """More than any machine has, which serving would refuse."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a kite. " * 20)
    judged = run_eval(MODEL, "--text", str(text), "--tasks", "none", "--kv-offloading-size", "1000000")
    assert judged.status == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_against_itself_differs_in_nothing(run_eval: Callable[..., Any], dtype: str) -> None:
    judged = run_eval(MODEL, "--dtype", dtype, "--baseline-dtype", dtype, "--tasks", "none")
    text = judged.report["text"]
    assert judged.status == 0
    assert (text["mean_kl"], text["largest_kl"], text["same_choice_share"]) == (0.0, 0.0, 1.0)
    assert text["perplexity_increase"] == 0.0
    assert 2.0 < text["model_perplexity"] < 4.0


def test_a_well_quantized_checkpoint_passes(
    run_eval: Callable[..., Any], fp8_copy: Callable[..., Path]
) -> None:
    judged = run_eval(str(fp8_copy()), "--against", MODEL)
    assert (judged.status, judged.failed_checks) == (0, [])
    assert 1e-5 < judged.report["text"]["mean_kl"] < 2e-3


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("model.layers.1.mlp.down_proj", ()),
        ("model.layers.3.mlp.up_proj", ()),
        ("model.layers.0.mlp.gate_proj", ()),
        ("model.layers.0.self_attn.o_proj", ()),
        ("model.layers.3.self_attn.v_proj", ()),
        # Attention that is three times too sharp changes little of this text.
        ("model.layers.0.self_attn.k_proj", ("--max-kl", "0.005")),
    ],
)
def test_one_scale_three_times_too_large_is_caught(
    run_eval: Callable[..., Any], fp8_copy: Callable[..., Path], module: str, flags: tuple[str, ...]
) -> None:
    judged = run_eval(str(fp8_copy({module: 3.0})), "--against", MODEL, "--tasks", "none", *flags)
    assert judged.status == 1
    assert "mean KL divergence" in judged.failed_checks
    assert "verdict: FAILED" in judged.stdout


def test_tasks_alone_catch_a_broken_checkpoint(
    run_eval: Callable[..., Any], fp8_copy: Callable[..., Path]
) -> None:
    judged = run_eval(
        str(fp8_copy({"model.layers.1.mlp.down_proj": 3.0})), "--against", MODEL, "--text", "none"
    )
    assert (judged.status, judged.failed_checks) == (1, ["accuracy drop, bundled tasks"])
    (suite,) = judged.report["tasks"]
    assert suite["num_lost"] > suite["num_won"]
    assert len(suite["changed"]) == suite["num_lost"] + suite["num_won"]
    assert judged.report["text"] is None


def test_weights_that_are_not_numbers_fail(
    run_eval: Callable[..., Any], fp8_copy: Callable[..., Path]
) -> None:
    judged = run_eval(str(fp8_copy({"model.layers.1.mlp.down_proj": 1e40})), "--against", MODEL)
    assert judged.status == 1
    assert len(judged.failed_checks) == 3
    assert judged.report["text"]["mean_kl"] == "nan"
    assert judged.report["tasks"][0]["model_right"] == 0


def test_limits_are_wider_for_weights_of_four_bits_alone() -> None:
    flags = ("--text", "bundled", "--max-accuracy-drop", "7")
    eight, four = (
        parse_options([MODEL, "--quantization", one, *flags]).thresholds for one in ("int8", "int4")
    )
    assert eight == replace(DEFAULTS, max_accuracy_drop=7.0)
    assert four == replace(DEFAULTS_FOUR_BITS, max_accuracy_drop=7.0)
    assert four.max_kl > eight.max_kl
