"""What a runner does with adapters: each of its ranks reads its own part, beside the steps."""

from collections.abc import Sequence

import torch

from headway_runtime.adapters.adapted_linear import AdapterBank
from headway_runtime.adapters.adapter import AdapterFacts
from headway_runtime.adapters.loading import AdapterLoading
from headway_runtime.config import LoraConfig
from headway_runtime.parallel.ranks import Ranks, on_all_ranks


class AdaptersOnRanks:
    """The part of a runner that has `_adapters`: None for an engine without any."""

    ranks: Ranks
    _adapters: AdapterLoading | None

    @on_all_ranks
    def begin_adapter(self, slot: int, folder: str) -> None:
        """Begin to read an adapter's files, beside the steps."""
        self._loading.begin(slot, folder)

    def is_adapter_read(self, slot: int) -> bool:
        """Whether all ranks have read it, or failed to: no step waits for the slowest of them."""
        return self._loading.is_read(slot) and (self.ranks.size == 1 or self._is_read_by_all(slot))

    @on_all_ranks
    def _is_read_by_all(self, slot: int) -> bool:
        return bool(self.ranks.agree(int(self._loading.is_read(slot))))

    @on_all_ranks(confirmed=True, alike="digest")
    def finish_adapter(self, slot: int) -> AdapterFacts:
        """Use the adapter in the next step's chunks of that slot. ModelLoadError if it does not fit."""
        return self._loading.finish(slot)

    @on_all_ranks
    def drop_adapter(self, slot: int) -> None:
        """Forget an adapter that no chunk names any more."""
        self._loading.drop(slot)

    @property
    def _loading(self) -> AdapterLoading:
        assert self._adapters is not None, "an engine without adapters is never asked for one"
        return self._adapters


def open_adapters(
    lora: LoraConfig | None, prefixes: Sequence[str], dtype: torch.dtype, device: torch.device
) -> tuple[AdapterLoading | None, AdapterBank | None]:
    """prefixes: what may stand before the names of the model's layers in files."""
    if lora is None:
        return None, None
    bank = AdapterBank(lora.num_slots, dtype, device)
    return AdapterLoading(bank, prefixes, lora.max_lora_rank, lora.base), bank
