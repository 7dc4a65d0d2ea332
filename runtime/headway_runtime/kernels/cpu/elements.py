"""Types of numbers: as LLVM has them, and as they lie in memory."""

from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

I8, I16, I32, I64, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())


class BFloat(ir.Type):  # type: ignore[misc]  # untyped
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


# Of 16 lanes, two for each.
BFLOAT16_PAIRS = ir.VectorType(BFloat(), 32)


@dataclass(frozen=True, slots=True)
class Elements:
    """A type of numbers in memory. rounds_in_hardware: whether the processor turns float32 into them."""

    name: Literal["bfloat16", "float16", "float32"]
    num_bytes: int
    rounds_in_hardware: bool = False


FLOAT32 = Elements("float32", 4)
# On processors that multiply them, which round to them too.
BFLOAT16 = Elements("bfloat16", 2, rounds_in_hardware=True)
