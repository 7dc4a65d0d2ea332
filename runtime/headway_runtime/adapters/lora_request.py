"""Which adapter a call of the in-process engine is to be answered with. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, by vLLM's names and in its order; loaded when it is first asked for.

    lora_name: its name from then on. lora_int_id: a number of the caller's, which may stand for no second
    name; 0 for none. lora_path: a folder or a remote source; "" for one that is loaded already.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
