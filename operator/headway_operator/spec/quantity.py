"""Kubernetes quantities (`512Mi`, `500m`, `2e9`), read exactly as Kubernetes reads them.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/ (sign left out: no
field of ours may be negative). What is larger than 2^63-1 counts as that, as it says there.
"""

import re
from decimal import Decimal, DecimalException

QUANTITY_PATTERN = (
    r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE]\+?[0-9]+))?$"
)
_PARTS = re.compile(r"^\+?(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<suffix>.*)$")
LARGEST = Decimal(2**63 - 1)
_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal("1e3"),
    "M": Decimal("1e6"),
    "G": Decimal("1e9"),
    "T": Decimal("1e12"),
    "P": Decimal("1e15"),
    "E": Decimal("1e18"),
}


def parse_quantity(text: str | int) -> Decimal:
    """The value in base units (bytes, cores). ValueError names what is wrong."""
    if not re.fullmatch(QUANTITY_PATTERN, str(text)):
        raise ValueError(f"{text!r} is not a Kubernetes quantity; write for example 512Mi, 2G, 500m or 4")
    parts = _PARTS.match(str(text))
    assert parts is not None, "the pattern above holds the same parts"
    suffix = parts["suffix"]
    try:
        factor = _BINARY.get(suffix) or _DECIMAL.get(suffix) or Decimal(f"1{suffix}")
        return min(Decimal(parts["number"]) * factor, LARGEST)
    except DecimalException:
        return LARGEST  # an exponent that is too large to be one here
