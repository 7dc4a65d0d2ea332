"""The adapters of an engine in the user's own process: loaded when first asked for, or beforehand."""

import threading
from collections.abc import Sequence

from headway_runtime.adapters.adapter import AdapterEntry
from headway_runtime.adapters.lora_request import LoRARequest
from headway_runtime.adapters.options import lora_module
from headway_runtime.engine_thread import EngineThread
from headway_runtime.errors import InvalidRequestError
from headway_runtime.sampling_params import wrong

LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


class InprocessAdapters:
    """download_dir: where remote ones are kept. May be used from any thread."""

    def __init__(self, thread: EngineThread, download_dir: str | None) -> None:
        self._thread = thread
        self._download_dir = download_dir
        # Of two calls that ask for the same new adapter, one loads it.
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}

    def load(self, name: str, source: str, *, in_place: bool = False) -> None:
        module = lora_module(name, source, download_dir=self._download_dir)
        self._thread.load_adapter(module, in_place=in_place)

    def unload(self, name: str) -> None:
        self._thread.unload_adapter(name)
        with self._lock:
            self._names = {number: one for number, one in self._names.items() if one != name}

    def entries(self) -> list[AdapterEntry]:
        return self._thread.adapter_entries()

    def names_of(self, requests: LoraRequests, count: int) -> list[str]:
        """The name of each prompt's adapter, "" for none; what is not loaded yet is loaded now.

        InvalidRequestError unless it is one, or one for each of `count` prompts.
        """
        if requests is None:
            return [""] * count
        if isinstance(requests, LoRARequest):
            return [self._name_of(requests)] * count
        if not isinstance(requests, Sequence) or not all(
            one is None or isinstance(one, LoRARequest) for one in requests
        ):
            raise wrong("lora_request", requests, "want LoRARequest(...), or a list with one for each prompt")
        if len(requests) != count:
            raise InvalidRequestError(
                f"lora_request has {len(requests)} entries for {count} prompts; give one, or one for each",
                param="lora_request",
            )
        return ["" if one is None else self._name_of(one) for one in requests]

    def _name_of(self, request: LoRARequest) -> str:
        name, number, path = request.lora_name, request.lora_int_id, request.lora_path
        with self._lock:
            if number and self._names.get(number, name) != name:
                raise InvalidRequestError(
                    f"lora_int_id={number} is {self._names[number]!r} already, and not {name!r}; give each "
                    "adapter a number of its own, or 0",
                    param="lora_request",
                )
            known = {one.name: one.source for one in self.entries()}
            if name in known and path and known[name] != path:
                raise InvalidRequestError(
                    f"lora_path={path!r}: {name!r} was loaded from {known[name]!r}; unload it first, "
                    "or choose another name",
                    param="lora_request",
                )
            if name not in known and path:
                self.load(name, path)
            if number:
                # Not before: what could not be loaded has taken no number.
                self._names[number] = name
        return name
