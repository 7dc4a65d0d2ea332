"""A small random checkpoint, engines over it that are checked after every step, and slots of plain bytes."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.utils import logging as transformers_logging

from headway_runtime.config import EngineConfig, Envelope, Limits, OffloadConfig
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.offload.counters import OffloadCounters, OffloadSnapshot
from headway_runtime.offload.disk_tier import DiskTier, Read
from headway_runtime.request import Request, RequestOutput, SamplingParams

VOCAB_SIZE = 320
BLOCK_SIZE = 16
FLUSH_SECONDS = 30.0
GIB = 2**30


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    # Large enough for logits that differ clearly from each other.
    "initializer_range": 0.2,
}


def save_checkpoint(folder: Path, seed: int, **changes: Any) -> Path:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), 1)


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return save_checkpoint(tmp_path_factory.mktemp("other-model"), 2)


@pytest.fixture(scope="session")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers of which see the last 64 tokens."""
    folder = tmp_path_factory.mktemp("window")
    torch.manual_seed(4)
    config = MistralConfig(**SHAPE, sliding_window=64)
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dynamic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rotated by how long a sequence may become: up to 256 tokens, four times the length before scaling."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    folder = tmp_path_factory.mktemp("dynamic")
    return save_checkpoint(folder, 5, max_position_embeddings=64, rope_parameters=rope)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("draft"), 3, num_hidden_layers=1)


class Driver:
    """An engine, stepped with all invariants checked after every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = EngineMetrics()
        self.engine = EngineCore(config, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, prompt: Iterable[int], salt: str = "", **sampling: Any) -> str:
        now = time.monotonic()
        name = str(len(self.outputs))
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6} | sampling)
        self.engine.add_request(Request(name, tuple(prompt), params, now, 0, salt), now)
        self.outputs[name] = []
        return name

    def step(self) -> None:
        outputs = self.engine.step(time.monotonic()).outputs
        self.engine.check_integrity()
        for one in outputs:
            self.outputs[one.request_id].append(one)

    def run(self, max_steps: int = 20000) -> None:
        while self.engine.has_work:
            assert max_steps > 0, "not finished in time"
            max_steps -= 1
            self.step()

    def ask(self, prompt: Iterable[int], salt: str = "", **sampling: Any) -> tuple[list[int], int]:
        """The answer to one request, and how many tokens of its prompt were found."""
        name = self.add(prompt, salt, **sampling)
        self.run()
        outputs = self.outputs[name]
        assert outputs[-1].error is None
        return self.tokens(name), max(one.num_cached_tokens for one in outputs)

    def tokens(self, name: str) -> list[int]:
        return [token for one in self.outputs[name] for token in one.token_ids]

    @property
    def offload(self) -> OffloadSnapshot:
        return self.metrics.snapshot().offload

    @property
    def disk(self) -> DiskTier:
        tiers = self.engine._offload
        assert tiers is not None
        assert isinstance(tiers._disk, DiskTier)
        return tiers._disk

    def flush(self) -> None:
        assert self.disk.flush(FLUSH_SECONDS)


@pytest.fixture
def start_engine(model_folder: Path) -> Iterator[Callable[..., Driver]]:
    """start_engine(num_slots, disk=None, num_blocks=20, **changes of the config)."""
    started: list[Driver] = []

    def start(
        num_slots: int,
        disk: Path | None = None,
        *,
        num_blocks: int = 20,
        disk_bytes: int = GIB,
        **changes: Any,
    ) -> Driver:
        config = EngineConfig(
            model_path=str(model_folder),
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=256,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=block_bytes() * (num_blocks + 1),
            envelope=Envelope(8, 256),
            limits=Limits(8, 256),
            max_waiting=100,
            num_threads=1,
        )
        if num_slots:
            path = None if disk is None else str(disk)
            config = replace(config, offload=OffloadConfig(block_bytes() * num_slots, path, disk_bytes))
        started.append(Driver(replace(config, **changes)))
        return started[-1]

    yield start
    for one in started:
        one.engine.close()


def block_bytes() -> int:
    """float32: keys and values of two heads, sixteen numbers each, in three layers."""
    return BLOCK_SIZE * 3 * 2 * 2 * 16 * 4


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """random_prompts(seed, lengths): token ids."""

    def make(seed: int, lengths: Iterable[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]

    return make


@dataclass
class Slots:
    """Host memory of plain bytes. may_go_on: cleared, whoever touches a slot waits."""

    slots: list[bytearray]
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def settle(self) -> None:
        assert self.may_go_on.wait(FLUSH_SECONDS)


@dataclass
class DiskBench:
    """A disk tier over slots."""

    memory: Slots
    counters: OffloadCounters
    tier: DiskTier

    def put(self, key: bytes, contents: bytes, slot: int = 0) -> None:
        """Have contents on the disk, and no more in the slot."""
        self.memory.slots[slot][:] = contents
        self.tier.write(key, slot)
        assert self.tier.flush(FLUSH_SECONDS)
        self.memory.slots[slot][:] = bytes(len(contents))

    def get(self, key: bytes, slot: int = 1) -> bytes | None:
        self.tier.read(key, slot)
        (read,) = self.reads(1)
        assert (read.key, read.slot) == (key, slot)
        return bytes(self.memory.slots[slot]) if read.is_good else None

    def wait_for_write(self) -> None:
        """Until a write is under way."""
        tier = self.tier
        with tier._changed:
            assert tier._changed.wait_for(lambda: tier._busy_slot is not None, FLUSH_SECONDS)

    def reads(self, count: int) -> list[Read]:
        done: list[Read] = []
        ends_at = time.monotonic() + FLUSH_SECONDS
        while len(done) < count:
            assert time.monotonic() < ends_at, "not read in time"
            self.tier.wait(0.1)
            done += self.tier.completed()
        return done


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., DiskBench]]:
    """open_disk(limit_bytes=..., folder=...): a tier in the test's folder; several may be open."""
    opened: list[DiskBench] = []

    def open_tier(
        limit_bytes: int = GIB, folder: str = "headway-kv-" + "0" * 32, size: int = 64
    ) -> DiskBench:
        memory, counters = Slots([bytearray(size) for _ in range(4)]), OffloadCounters()
        memory.may_go_on.set()
        tier = DiskTier(tmp_path, limit_bytes, lambda: folder, memory, counters)
        opened.append(DiskBench(memory, counters, tier))
        assert tier.flush(FLUSH_SECONDS)
        return opened[-1]

    yield open_tier
    for one in opened:
        one.memory.may_go_on.set()
        one.tier.close()
