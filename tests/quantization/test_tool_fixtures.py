"""Checkpoints in this folder, of the tools and of published layouts: they are what theirs say, and served."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.quantization.make_layout_fixtures import make
from tests.quantization.tool_checkpoints import dequantized

FIXTURES = Path(__file__).parent / "fixtures"
LAYOUTS = Path(__file__).parent / "layout_fixtures"
MADE_BY_LAYOUT = sorted(path.name for path in LAYOUTS.iterdir() if path.is_dir())
MADE_BY_TOOLS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", MADE_BY_TOOLS)
def test_checkpoints_of_the_tools_are_what_the_tools_make_of_them(name: str) -> None:
    # AutoAWQ and GPTQModel compute in float16.
    assert_products(FIXTURES / name, tolerance=2e-3)


@pytest.mark.parametrize("name", MADE_BY_LAYOUT)
def test_checkpoints_of_published_layouts_are_what_their_bits_say(name: str) -> None:
    assert_products(LAYOUTS / name, tolerance=2e-5)


def test_the_script_makes_the_fixtures_of_layouts_that_are_here(tmp_path: Path) -> None:
    make(tmp_path / "made")
    files = {path.relative_to(LAYOUTS) for path in LAYOUTS.rglob("*") if path.is_file()}
    made = {path.relative_to(tmp_path / "made") for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert made == files
    for name in files:
        assert (tmp_path / "made" / name).read_bytes() == (LAYOUTS / name).read_bytes(), name


@pytest.mark.parametrize("name", MADE_BY_LAYOUT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_published_layouts_are_served(
    dtype: str, name: str, start_runner: Any, logits_of: Any
) -> None:
    runner = start_runner(LAYOUTS / name, dtype=dtype)
    assert logits_of(runner, [1, 2, 3]).isfinite().all()


def assert_products(folder: Path, *, tolerance: float) -> None:
    """Each weight times the vector is what products.json says."""
    products = json.loads((folder / "products.json").read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    inner = config["intermediate_size"]
    shapes = {
        module: (len(rows), inner if module.endswith("down_proj") else config["hidden_size"])
        for module, rows in products.items()
    }
    for module, weight in dequantized(folder, shapes).items():
        got = weight.astype(np.float64) @ np.linspace(-1, 1, weight.shape[1])
        where = f"{folder.name} {module}"
        np.testing.assert_allclose(got, products[module], rtol=tolerance, atol=tolerance, err_msg=where)


@pytest.mark.parametrize("name", MADE_BY_TOOLS)
def test_checkpoints_of_the_tools_are_served(name: str, start_runner: Any, logits_of: Any) -> None:
    runner = start_runner(FIXTURES / name)
    assert logits_of(runner, [1, 2, 3]).isfinite().all()


def test_every_kind_of_tool_is_among_the_fixtures() -> None:
    methods = {
        json.loads((FIXTURES / name / "config.json").read_bytes())["quantization_config"]["quant_method"]
        for name in MADE_BY_TOOLS
    }
    assert methods == {"awq", "gptq", "compressed-tensors"}
