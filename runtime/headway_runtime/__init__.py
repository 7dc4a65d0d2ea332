"""Headway's engine. `Engine` runs it in this process; `headway serve` runs it behind an HTTP server.

The names are imported when they are first asked for: importing the package alone loads neither torch nor
anything else that takes time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway_runtime.adapters.lora_request import LoRARequest
    from headway_runtime.generation_output import CompletionOutput, GenerationOutput, Timings
    from headway_runtime.inprocess import Engine
    from headway_runtime.request import Grammar, TokenLogprobs
    from headway_runtime.sampling_params import SamplingParams
    from headway_runtime.structured_outputs import StructuredOutputsParams

_MODULES = {
    "CompletionOutput": "generation_output",
    "Engine": "inprocess",
    "GenerationOutput": "generation_output",
    "Grammar": "request",
    "LoRARequest": "adapters.lora_request",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
    "Timings": "generation_output",
    "TokenLogprobs": "request",
}

__all__ = [
    "CompletionOutput",
    "Engine",
    "GenerationOutput",
    "Grammar",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputsParams",
    "Timings",
    "TokenLogprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headway_runtime' has no attribute {name!r}")
    return getattr(import_module(f"headway_runtime.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
