"""The dot rule holds in the interpreter for every type that kernels multiply, and tables are looked up."""

import pytest
import torch
import triton
import triton.language as tl

from headway_runtime.kernels.triton import launch


@triton.jit  # type: ignore[untyped-decorator]
def multiply(a, b, out, n: tl.constexpr, accumulates: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, n)
    places = rows[:, None] * n + rows[None, :]
    product = launch.dot(tl.load(a + places), tl.load(b + places), tl.zeros((n, n), accumulates))
    tl.store(out + places, product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_of_floats_is_exact_to_float32(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    a, b = (torch.randn(32, 32, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.full((32, 32), torch.nan, device=device)

    multiply[(1,)](a, b, out, 32, tl.float32)

    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_dot_of_int8_is_exact(device: torch.device, generator: torch.Generator) -> None:
    a, b = (
        torch.randint(-128, 128, (32, 32), dtype=torch.int8, device=device, generator=generator)
        for _ in range(2)
    )
    out = torch.full((32, 32), -1, dtype=torch.int32, device=device)

    multiply[(1,)](a, b, out, 32, tl.int32)

    assert torch.equal(out.cpu().long(), a.cpu().long() @ b.cpu().long())


def test_a_class_without_an_entry_has_its_kernels_default(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"nvidia_h200": {"k": {"wide": {"rows": 8}}}, "default": {"k": {"default": {"rows": 1}}}}
    monkeypatch.setattr(launch, "_table", lambda gpu: tables.get(gpu, {}))
    h200, other = launch.Gpu("nvidia_h200", 90, 132), launch.Gpu("nvidia_a100_sxm4_80gb", 80, 108)

    assert launch.configuration("k", "wide", h200) == {"rows": 8}
    assert launch.configuration("k", "thin", h200) == {"rows": 1}
    assert launch.configuration("k", "wide", other) == {"rows": 1}
    with pytest.raises(KeyError, match="'q' has no configuration"):
        launch.configuration("q", "wide", h200)
