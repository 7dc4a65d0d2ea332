"""The bodies of the routes that load and unload LoRA adapters."""

from typing import Annotated

from pydantic import Field

from headway_runtime.server.body import StrictBody

LONGEST_SOURCE = 4096


class LoadAdapterBody(StrictBody):
    """POST /v1/load_lora_adapter. load_inplace: another adapter of that name gives way to it."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=LONGEST_SOURCE)]
    load_inplace: bool | None = None


class UnloadAdapterBody(StrictBody):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]
