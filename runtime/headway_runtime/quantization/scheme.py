"""What a configuration says of one module's weights (`Scheme`), and which modules it is said of (`Rule`)."""

import re
from dataclasses import dataclass
from typing import Literal

# Where numbers lie in a checkpoint's tensors: as AutoAWQ packs them, as GPTQ's tools do, as llm-compressor
# does (pack-quantized), or each in an element of its own.
Layout = Literal["awq", "gptq", "packed", "plain"]
# What shares a scale: all weights, those of an output, some inputs of an output, a block of both.
Strategy = Literal["tensor", "channel", "group", "block"]
# What a weight becomes in memory; see `layers.quantized_weights`.
Form = Literal["int4", "int8", "int8 group", "fp8"]


@dataclass(frozen=True, slots=True)
class InputScheme:
    """Inputs of the product are 8-bit integers too. is_dynamic: each row has its own scale."""

    is_dynamic: bool
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a module lie in a checkpoint, and what they mean.

    group_size: inputs that share a scale, with the strategy "group".
    block: rows and columns that do, with "block".
    has_input_order: groups are of inputs in an order of their own, which the checkpoint names.
    zero_offset: what is added to zero points as they are stored.
    zeros_borrow: whether a zero point of 0 may have borrowed from its neighbours when 1 was taken off it.
    input: None where the product takes its input as it is.
    has_input_scale: whether the checkpoint carries a scale of inputs that the product does without.
    """

    layout: Layout
    bits: Literal[4, 8]
    strategy: Strategy
    is_float: bool = False
    group_size: int | None = None
    block: tuple[int, int] | None = None
    is_symmetric: bool = True
    has_input_order: bool = False
    zero_offset: int = 0
    zeros_borrow: bool = False
    input: InputScheme | None = None
    has_input_scale: bool = False

    @property
    def form(self) -> Form:
        """What such weights become in memory."""
        if self.is_float:
            return "fp8"
        if self.bits == 4:
            return "int4"
        if (
            self.layout in ("packed", "plain")
            and self.is_symmetric
            and self.strategy in ("tensor", "channel")
        ):
            return "int8"
        return "int8 group"


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that have one scheme; None: they are not quantized.

    pattern: a regular expression that a module's name begins with. is_whole: it is all of the name.
    """

    pattern: re.Pattern[str]
    scheme: Scheme | None
    is_whole: bool = False

    def applies(self, module: str) -> bool:
        match = self.pattern.fullmatch if self.is_whole else self.pattern.match
        return match(module) is not None


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """method: as `quant_method` names it, or as the user asks for it. The first rule that applies decides."""

    method: str
    rules: tuple[Rule, ...]

    @property
    def schemes(self) -> list[Scheme]:
        """Of all modules that are quantized."""
        return [rule.scheme for rule in self.rules if rule.scheme is not None]

    def scheme_of(self, module: str) -> Scheme | None:
        """module: such as "model.layers.0.mlp.down_proj". None: its weights are plain numbers."""
        return next((rule.scheme for rule in self.rules if rule.applies(module)), None)


EVERYTHING = re.compile("")


def part_of_name(text: str) -> re.Pattern[str]:
    """Names that hold `text` as whole parts between dots: "mlp.gate" is one of "layers.0.mlp.gate"."""
    return re.compile(rf"(?:.*\.)?{re.escape(text)}(?:\..*)?$")
