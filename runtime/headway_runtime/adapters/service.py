"""The adapters of one engine: their names, who uses which, and when their memory is free again. No torch.

An adapter gets a slot, a small number by which batches and the runner know it. A name is found once, when a
request is accepted; the request then has that slot until it ends, whatever happens to the name meanwhile. So
an unloaded adapter is gone for new requests at once, and its slot and memory are free when the last request
that has it ends; and another adapter may be loaded under the same name before that, as it gets another slot.

Loading reads files, which takes longer than a step: it is begun, looked after between steps, and finished.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headway_runtime.adapters.adapter import NO_ADAPTER, Adapter, AdapterEntry, AdapterFacts
from headway_runtime.adapters.metrics import AdapterCounters, AdapterSnapshot
from headway_runtime.config import LoraConfig, LoraModule
from headway_runtime.errors import (
    AdapterNotFoundError,
    AdapterRefusedError,
    HeadwayRuntimeError,
    ModelLoadError,
    OtherResultError,
)


class AdapterRunner(Protocol):
    """What holds the weights; arguments are plain, as each process of a model gets them."""

    def begin_adapter(self, slot: int, folder: str) -> None:
        """Begin to read the files of an adapter."""

    def is_adapter_read(self, slot: int) -> bool:
        """Whether `finish_adapter` would not wait."""

    def finish_adapter(self, slot: int) -> AdapterFacts:
        """Use what was read from the next step on. ModelLoadError if that cannot be."""

    def drop_adapter(self, slot: int) -> None:
        """Forget its weights."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What became of a load. error: None if the adapter can be used now."""

    token: object
    module: LoraModule
    error: str | None


@dataclass(frozen=True, slots=True)
class _Loading:
    """One that is being read. token: the caller's."""

    token: object
    module: LoraModule
    slot: int


class AdapterService:
    """Used by the engine's thread alone. unix_clock: seconds since 1970."""

    def __init__(
        self, config: LoraConfig, runner: AdapterRunner, unix_clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.counters = AdapterCounters()
        self._runner = runner
        self._unix_clock = unix_clock
        self._free = list(range(config.num_slots, 0, -1))
        self._by_name: dict[str, Adapter] = {}
        self._entries: dict[str, AdapterEntry] = {}
        self._loading: dict[str, _Loading] = {}
        self._used_by: dict[str, Adapter] = {}
        self._num_users: Counter[int] = Counter()
        # Slots whose adapters have no name any more, and end with their last request.
        self._leaving: set[int] = set()
        # Of all that have weights in memory.
        self._num_bytes: dict[int, int] = {}
        # Grows when the list of adapters changes.
        self.version = 0

    # What requests use.

    def acquire(self, name: str, request_id: str) -> Adapter:
        """The adapter of that name for a request, until `release`; again, the same one.

        AdapterNotFoundError if there is none.
        """
        if not name:
            return NO_ADAPTER
        if request_id in self._used_by:
            return self._used_by[request_id]
        adapter = self._by_name.get(name)
        if adapter is None:
            raise AdapterNotFoundError(name)
        self._used_by[request_id] = adapter
        self._num_users[adapter.slot] += 1
        return adapter

    def of(self, request_id: str) -> Adapter:
        """What a request has acquired."""
        return self._used_by.get(request_id, NO_ADAPTER)

    def release(self, request_id: str) -> None:
        """The request has ended. Of others, nothing happens."""
        adapter = self._used_by.pop(request_id, None)
        if adapter is None:
            return
        self._num_users[adapter.slot] -= 1
        if not self._num_users[adapter.slot]:
            del self._num_users[adapter.slot]
            if adapter.slot in self._leaving:
                self._leaving.remove(adapter.slot)
                self._give_back(adapter.slot)

    # What is loaded.

    @property
    def entries(self) -> list[AdapterEntry]:
        """Those that new requests may name, in the order in which they were loaded."""
        return list(self._entries.values())

    @property
    def num_leaving(self) -> int:
        """Adapters without a name, which are still in use."""
        return len(self._leaving)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def snapshot(self, running: Iterable[str], waiting: Iterable[str]) -> AdapterSnapshot:
        """running, waiting: names of the adapters of requests, "" for none."""
        counters = self.counters
        return AdapterSnapshot(
            max_loras=self.config.max_loras,
            names=tuple(self._entries),
            num_bytes=sum(self._num_bytes.values()),
            num_leaving=self.num_leaving,
            running=tuple(sorted(set(running) - {""})),
            waiting=tuple(sorted(set(waiting) - {""})),
            num_loaded=counters.num_loaded,
            num_failed=counters.num_failed,
            num_unloaded=counters.num_unloaded,
        )

    def load_now(self, module: LoraModule) -> None:
        """Load, and wait for it. ModelLoadError or AdapterRefusedError."""
        self.begin(module, token=None)
        self._finish(self._loading.pop(module.name))

    def begin(self, module: LoraModule, *, token: object, in_place: bool = False) -> None:
        """Begin a load, whose outcome `poll` tells. in_place: another one of that name gives way to it.

        AdapterRefusedError for a name that is taken, or if there is no slot.
        """
        name = module.name
        if name in self._loading:
            raise AdapterRefusedError(f"the LoRA adapter {name!r} is being loaded already; wait for that")
        if name in self._by_name and not in_place:
            raise AdapterRefusedError(
                f"the LoRA adapter {name!r} has already been loaded; unload it, or send load_inplace=true"
            )
        if not self._free:
            leaving = f", {self.num_leaving} of them until their last requests end" if self._leaving else ""
            raise AdapterRefusedError(
                f"lora_name={name!r}: no room: --max-cpu-loras={self.config.max_cpu_loras} adapters "
                f"are loaded{leaving}; unload one, or raise --max-cpu-loras"
            )
        slot = self._free.pop()
        self._loading[name] = _Loading(token, module, slot)
        self._runner.begin_adapter(slot, str(Path(module.folder)))

    def poll(self) -> list[LoadOutcome]:
        """Finish the loads that have been read since the last call."""
        outcomes = []
        for loading in [one for one in self._loading.values() if self._runner.is_adapter_read(one.slot)]:
            del self._loading[loading.module.name]
            error = None
            try:
                self._finish(loading)
            except HeadwayRuntimeError as failure:
                error = str(failure)
            outcomes.append(LoadOutcome(loading.token, loading.module, error))
        return outcomes

    def unload(self, name: str) -> None:
        """From now on no request finds it. AdapterNotFoundError if there is no such adapter."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise AdapterNotFoundError(name)
        del self._entries[name]
        self.counters.num_unloaded += 1
        self.version += 1
        self._leave(adapter)

    def check_integrity(self) -> None:
        """AssertionError if a slot is lost, or has two owners."""
        named = [adapter.slot for adapter in self._by_name.values()]
        loading = [one.slot for one in self._loading.values()]
        owned = [*named, *loading, *self._leaving, *self._free]
        assert sorted(owned) == list(range(1, self.config.num_slots + 1)), owned
        users = Counter(adapter.slot for adapter in self._used_by.values())
        assert users == self._num_users
        assert users.keys() <= {*named, *self._leaving}
        assert self._leaving <= users.keys(), "nobody uses it, and its memory is not free"

    def _finish(self, loading: _Loading) -> None:
        module, slot = loading.module, loading.slot
        try:
            facts = self._runner.finish_adapter(slot)
        except HeadwayRuntimeError as error:
            # Another process of the model may have found no fault with it.
            self._runner.drop_adapter(slot)
            self._free.append(slot)
            self.counters.num_failed += 1
            if isinstance(error, OtherResultError):
                raise ModelLoadError(
                    f"{module.folder}: {error.who} has other files there than rank 0; copy the same adapter "
                    "to all nodes"
                ) from error
            raise
        self._num_bytes[slot] = facts.num_bytes
        self.counters.num_loaded += 1
        before = self._by_name.pop(module.name, None)
        self._by_name[module.name] = Adapter(slot, facts.digest, module.name)
        self._entries.pop(module.name, None)
        self._entries[module.name] = AdapterEntry(
            module.name, module.source, module.parent, int(self._unix_clock())
        )
        self.version += 1
        if before is not None:
            self._leave(before)

    def _leave(self, adapter: Adapter) -> None:
        if self._num_users[adapter.slot]:
            self._leaving.add(adapter.slot)
        else:
            del self._num_users[adapter.slot]
            self._give_back(adapter.slot)

    def _give_back(self, slot: int) -> None:
        self._runner.drop_adapter(slot)
        del self._num_bytes[slot]
        self._free.append(slot)
