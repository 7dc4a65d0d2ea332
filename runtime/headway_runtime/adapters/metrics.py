"""What is counted of adapters. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    """Of one instant.

    max_loras: adapters that one step may have; 0 where there can be none. names, num_bytes: of those that are
    loaded. num_leaving: unloaded ones that are still in use. running, waiting: names of adapters with
    requests that run or wait. num_loaded, num_failed, num_unloaded: since the start.
    """

    max_loras: int = 0
    names: tuple[str, ...] = ()
    num_bytes: int = 0
    num_leaving: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    num_loaded: int = 0
    num_failed: int = 0
    num_unloaded: int = 0


@dataclass(slots=True)
class AdapterCounters:
    """The live numbers."""

    num_loaded: int = 0
    num_failed: int = 0
    num_unloaded: int = 0
