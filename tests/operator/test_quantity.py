"""Kubernetes quantities."""

from decimal import Decimal

import pytest

from headway_operator.spec import parse_quantity


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("512Mi", 512 * 1024**2),
        ("1.5Gi", 1536 * 1024**2),
        ("2G", 2_000_000_000),
        ("500m", Decimal("0.5")),
        ("1e3", 1000),
        ("1E3", 1000),
        ("3E", 3 * 10**18),
        ("2Ei", 2 * 1024**6),
        (".5", Decimal("0.5")),
        ("+7", 7),
        (4096, 4096),
        ("100n", Decimal("0.0000001")),
    ],
)
def test_reads_as_kubernetes_does(text: str | int, want: Decimal | int) -> None:
    assert parse_quantity(text) == want


@pytest.mark.parametrize("text", ["", "Mi", "12Q", "1 Gi", "-1", "1mi", "1e", "0x10", "1Gi\n"])
def test_refuses_what_kubernetes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


@pytest.mark.parametrize("text", ["1e30", "9e999999999", "1e9999999999999999999", 10**25, "16Ei"])
def test_no_quantity_is_larger_than_kubernetes_has_them(text: str | int) -> None:
    assert parse_quantity(text) == 2**63 - 1
