"""What is known of an adapter outside of its weights. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as a sequence uses it.

    slot: its number in batches and in the runner; 0: none. digest: of its files' contents: what is computed
    with equal digests is equal, whatever the names are.
    """

    slot: int = 0
    digest: bytes = b""
    name: str = ""


NO_ADAPTER = Adapter()


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What loading an adapter has shown. num_bytes: of its weights in memory, on all ranks alike.

    base_model: what its configuration says that it was trained for; "" if nothing.
    """

    digest: bytes
    rank: int
    num_modules: int
    num_bytes: int
    base_model: str


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter as lists have it. source: as it was named. parent: the name of the model that it changes,
    "" for the first one that is served. loaded_at: seconds since 1970."""

    name: str
    source: str
    parent: str
    loaded_at: int
