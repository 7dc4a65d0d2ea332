"""Quantized checkpoints that say float16 are computed in what a CPU's products of codes take, unless told."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headway_runtime import served_dtype as under_test
from headway_runtime.fit.placement import Placement, this_processor
from headway_runtime.fit.plan_command import main as plan
from headway_runtime.layers.quantized_linear import TiledLinear
from headway_runtime.model_config import StoredDtype
from headway_runtime.quantization.choice import Quantization
from headway_runtime.served_dtype import served_dtype

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
has_products = this_processor("bfloat16", 1).has_strips
with_products = pytest.mark.skipif(not has_products, reason="this processor has no products of codes")


@pytest.mark.parametrize(
    ("wanted", "stored", "quantization", "device", "products", "want"),
    [
        pytest.param("auto", "float16", "awq", "cpu", "products", "bfloat16", id="a quantized checkpoint"),
        pytest.param("auto", "float16", "int8", "cpu", "products", "bfloat16", id="quantized at load"),
        pytest.param("auto", "float16", "none", "cpu", "products", "float16", id="plain weights"),
        pytest.param("auto", "float16", "awq", "cuda", "products", "float16", id="a GPU"),
        pytest.param("auto", "float16", "awq", "cpu", "none", "float16", id="a CPU without products"),
        pytest.param("auto", "float32", "awq", "cpu", "products", "float32", id="float32"),
        pytest.param("auto", "bfloat16", "awq", "cpu", "products", "bfloat16", id="bfloat16"),
        pytest.param("float16", "float16", "awq", "cpu", "products", "float16", id="told"),
        pytest.param("float32", "float16", "awq", "cpu", "products", "float32", id="told another"),
    ],
)
def test_auto_is_the_checkpoints_dtype_unless_codes_need_another(
    wanted: str,
    stored: StoredDtype,
    quantization: str,
    device: str,
    products: str,
    want: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = Placement(True, "bfloat16", has_strips=products == "products")
    monkeypatch.setattr(under_test, "this_processor", lambda *_, **__: processor)
    assert served_dtype(wanted, stored, Quantization(quantization), is_cpu=device == "cpu") == want


@pytest.fixture
def float16_checkpoint(write_checkpoint: Any, packers: Any) -> Path:
    folder: Path = write_checkpoint(AWQ, packers["awq"](32), dtype="float16").folder
    return folder


@with_products
def test_products_of_codes_serve_a_float16_checkpoint(
    float16_checkpoint: Path, start_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = start_runner(float16_checkpoint)
    assert runner.kept_as["dtype"] == runner.kv_dtype == "bfloat16"
    assert TiledLinear not in {type(one) for one in runner._model.linears}
    assert "dtype auto: bfloat16, though the checkpoint says float16" in caplog.text
    assert "in bfloat16, quantization awq" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@with_products
def test_float16_is_obeyed_with_a_warning(
    float16_checkpoint: Path, start_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runner = start_runner(float16_checkpoint, dtype="float16")
    assert runner.kept_as["dtype"] == "float16"
    assert TiledLinear in {type(one) for one in runner._model.linears}
    (warning,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert warning.getMessage().startswith("--dtype float16 is slow here")


@with_products
def test_a_plan_counts_the_dtype_that_is_served(
    float16_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan([str(float16_checkpoint), "--device", "cpu", "--json"]) == 0
    kept = {one["part"]: one["kept_as"] for one in json.loads(capsys.readouterr().out)["weights"]}
    assert (kept["embedding"], kept["MLP"]) == ("bfloat16", "int4")
