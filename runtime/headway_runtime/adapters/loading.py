"""Reads adapters beside the engine's steps, and puts them into the model's products between two of them."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from headway_runtime.adapters.adapted_linear import AdapterBank, AnyDelta
from headway_runtime.adapters.adapter import AdapterFacts
from headway_runtime.adapters.adapter_file import read_adapter
from headway_runtime.errors import HeadwayRuntimeError, ModelLoadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    facts: AdapterFacts
    deltas: list[AnyDelta | None]


class AdapterLoading:
    """prefixes: what may stand before the names of layers in files. base: as `LoraConfig` has it."""

    def __init__(self, bank: AdapterBank, prefixes: Sequence[str], max_rank: int, base: str = "") -> None:
        self._base = base
        self._bank = bank
        self._prefixes = tuple(prefixes)
        self._max_rank = max_rank
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading: dict[int, Future[_Read]] = {}

    def begin(self, slot: int, folder: str) -> None:
        self._reading[slot] = self._threads.submit(self._read, Path(folder))

    def is_read(self, slot: int) -> bool:
        return self._reading[slot].done()

    def finish(self, slot: int) -> AdapterFacts:
        """Waits until it is read. ModelLoadError if that failed."""
        read = self._reading.pop(slot).result()
        with torch.inference_mode():
            self._bank.put(slot, read.deltas)
        return read.facts

    def drop(self, slot: int) -> None:
        with torch.inference_mode():
            self._bank.drop(slot)

    def _read(self, folder: Path) -> _Read:
        with torch.inference_mode():
            try:
                found = read_adapter(folder, self._bank.layers, self._prefixes, self._max_rank)
                deltas = self._bank.made(found.deltas)
            except (MemoryError, RuntimeError) as error:  # PyTorch's for want of memory is the latter
                raise ModelLoadError(
                    f"{folder}: cannot be taken into memory ({type(error).__name__}: {error}); unload "
                    "another adapter, or lower --kv-cache-memory-bytes"
                ) from error
            except HeadwayRuntimeError:
                raise
            except Exception as error:
                # Whatever is wrong with somebody's files: it must not end the engine, which serves others.
                logger.exception("adapter %s cannot be read", folder)
                raise ModelLoadError(
                    f"{folder}: cannot be read ({type(error).__name__}: {error}); copy the adapter again, or "
                    "save it anew with PEFT"
                ) from error
        facts = AdapterFacts(
            digest=found.digest,
            rank=found.rank,
            num_modules=len(found.deltas),
            num_bytes=sum(one.num_bytes for one in deltas if one is not None),
            base_model=found.config.base_model,
        )
        logger.info(
            "adapter %s: rank %d, %d layers, %.1f MB, trained for %r",
            folder,
            facts.rank,
            facts.num_modules,
            facts.num_bytes / 1e6,
            facts.base_model,
        )
        if is_another_base(facts.base_model, self._base):
            logger.warning(
                "adapter %s: base_model_name_or_path=%r is not the model served, %r, by its name; answers "
                "mean something only if the weights are the same",
                folder,
                facts.base_model,
                self._base,
            )
        return _Read(facts, deltas)


def is_another_base(told: str, served: str) -> bool:
    """Whether two names of models, of which either may be "", end in another name: the folder may be any."""
    own, other = (_last_part(one) for one in (served, told))
    return bool(own) and bool(other) and own != other


def _last_part(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2]
    return last.partition("@")[0].casefold()
