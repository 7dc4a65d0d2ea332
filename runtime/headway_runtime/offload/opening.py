"""Makes an engine's tiers out of what it was told."""

from functools import partial
from importlib.metadata import version
from pathlib import Path

from headway_runtime.config import EngineConfig
from headway_runtime.offload.counters import OffloadCounters
from headway_runtime.offload.disk_folder import check_folder
from headway_runtime.offload.disk_tier import DiskTier, HostMemory
from headway_runtime.offload.identity import folder_name
from headway_runtime.offload.tiers import KVOffload


def open_offload(
    config: EngineConfig,
    memory: HostMemory,
    *,
    num_slots: int,
    slot_bytes: int,
    kept_as: dict[str, str],
    counters: OffloadCounters,
) -> KVOffload:
    """kept_as: how weights, keys and values are kept and computed with. ConfigError for a useless folder."""
    told = config.offload
    assert told is not None
    disk = None
    if told.disk_path is not None:
        path = Path(told.disk_path)
        check_folder(path)
        parts = {
            **kept_as,
            "headway": version("headway"),
            "device": config.device,
            "load_format": config.load_format,
            "seed": config.seed if config.load_format == "dummy" else 0,
            "block_size": config.block_size,
            "slot_bytes": slot_bytes,
            "rank": 0,
            "num_ranks": 1,
        }
        name_folder = partial(folder_name, parts, Path(config.model_path), path)
        disk = DiskTier(path, told.disk_bytes, name_folder, memory, counters)
    return KVOffload(
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        block_size=config.block_size,
        counters=counters,
        disk=disk,
    )
