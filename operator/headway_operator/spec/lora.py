"""LoRA adapters that a service has beside its model."""

from collections import Counter
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from headway_operator.spec.base import SpecModel, rules
from headway_operator.spec.source import Source, scheme_of

MOST_ADAPTERS = 64
BUNDLED_RULE = "!self.source.startsWith('bundled://')"
BUNDLED_MESSAGE = "no adapters are bundled: set source to one of the other forms"
ORDER_RULE = "!has(self.maxCpuLoras) || !has(self.maxLoras) || self.maxCpuLoras >= self.maxLoras"
ORDER_MESSAGE = "maxCpuLoras must not be less than maxLoras: raise lora.maxCpuLoras or lower lora.maxLoras"
ROOM_RULE = "!has(self.maxCpuLoras) || !has(self.adapters) || self.maxCpuLoras >= size(self.adapters)"
ROOM_MESSAGE = "maxCpuLoras must not be less than the number of adapters: raise lora.maxCpuLoras"


class LoraAdapter(SpecModel):
    """An adapter that every replica loads when it starts."""

    model_config = ConfigDict(json_schema_extra=rules((BUNDLED_RULE, BUNDLED_MESSAGE)))
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s]+$")]
    """What requests name as their `model` to be answered with it, 1 to 256 characters without spaces. No
    default."""
    source: Source
    """Where the adapter lies, as PEFT saves it; forms as model.source's but bundled://, opened by
    model.credentialsSecretRef, too. No default."""

    @model_validator(mode="after")
    def _is_not_bundled(self) -> Self:
        if scheme_of(self.source) == "bundled":
            raise ValueError(f"{BUNDLED_MESSAGE}; source is {self.source!r}")
        return self


class Lora(SpecModel):
    """LoRA adapters: variants of the model that share its weights. Editing them makes a new revision."""

    model_config = ConfigDict(json_schema_extra=rules((ORDER_RULE, ORDER_MESSAGE), (ROOM_RULE, ROOM_MESSAGE)))
    adapters: list[LoraAdapter] = Field(
        default_factory=list,
        max_length=MOST_ADAPTERS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Adapters that replicas load when they start, at most 64. Default: none; the operator's token loads
    some live."""
    max_loras: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Different adapters in one step of a replica (1 to 1024). Default: the engine's, 8."""
    max_cpu_loras: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Adapters that a replica holds at once (1 to 1024). Default: the larger of maxLoras and the number of
    adapters."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    """Largest rank of an adapter (1 to 512). Default: the engine's, 16."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        most = self.max_cpu_loras
        if most is not None and self.max_loras is not None and most < self.max_loras:
            raise ValueError(ORDER_MESSAGE)
        if most is not None and most < len(self.adapters):
            raise ValueError(ROOM_MESSAGE)
        twice = [name for name, count in Counter(one.name for one in self.adapters).items() if count > 1]
        if twice:
            raise ValueError(f"adapters name {twice[0]!r} twice: give each a name of its own")
        return self
