"""Products of many rows where a CPU has none of their dtype: float32 tile by tile, rounded once."""

import pytest
import torch

from headway_runtime.layers import linear as under_test
from headway_runtime.layers.linear import LEAST_WIDE_ROWS, Linear, WideLinear, make_linear


@pytest.fixture
def multiplies_nothing_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "can_pack", lambda: False)
    monkeypatch.setattr(under_test, "_has_halves", lambda: False)
    monkeypatch.setattr(under_test, "pairs_linear", lambda *_: None)


@pytest.mark.parametrize("rows", [1, LEAST_WIDE_ROWS - 1, LEAST_WIDE_ROWS, 33])
@pytest.mark.parametrize("has_bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("multiplies_nothing_of_16_bits")
def test_wide_products_are_those_of_float32(
    dtype: torch.dtype,
    has_bias: bool,  # noqa: FBT001 - a row of a table
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_test, "WIDE_TILE_NUMBERS", 7 * 48)  # several tiles, the last one not whole
    parts = [torch.randn(outputs, 48).to(dtype) for outputs in (20, 13)]
    bias = torch.randn(33).to(dtype) if has_bias else None
    layer = make_linear(parts, bias)
    assert isinstance(layer, WideLinear)
    x = torch.randn(rows, 48).to(dtype)
    want = x.float() @ torch.cat(parts).float().t()
    if bias is not None:
        want += bias.float()
    torch.testing.assert_close(layer(x).float(), want, rtol=2e-2, atol=5e-2)
    assert layer(x).dtype == dtype


@pytest.mark.usefixtures("multiplies_nothing_of_16_bits")
def test_float32_is_multiplied_as_it_is() -> None:
    assert type(make_linear([torch.randn(8, 16)])) is Linear
