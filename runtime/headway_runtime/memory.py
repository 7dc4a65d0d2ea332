"""How much memory the KV cache gets, and how many blocks that makes: arithmetic, and a look at the machine.

Imports no torch; a GPU's memory is told.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from headway_runtime.config import KVCacheDtype
from headway_runtime.errors import ConfigError
from headway_runtime.model_config import ModelConfig

# Of what is free once the weights are loaded. The rest of a machine's memory belongs to others too, and what
# a cache does not hold yet counts as free; that of a GPU does not, but activations and workspaces need some.
CPU_FRACTION = 0.4
CUDA_FRACTION = 0.85
# Of all memory, where a system does not say how much is free (macOS).
FREE_FRACTION = 0.5
# Of a GPU's memory, what is left alone where steps have been measured: gaps between tensors that come and go
# in another order than they were measured in, and what drivers and libraries take later on.
SPARE_SHARE = 0.02

# Of a GPU's memory, what blocks pass through on their way to main memory and back (`offload.staged_copies`):
# halves, each of so many blocks, or fewer of as many bytes as these.
NUM_HALVES, MOST_STAGED_BLOCKS, MOST_STAGED_BYTES = 2, 128, 128 << 20

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Of a key's, or value's, number, and what each token and head has besides: a float32 scale, or nothing.
KV_BYTES = {"bfloat16": (2, 0), "float16": (2, 0), "float32": (4, 0), "fp8_e4m3": (1, 4), "int8": (1, 4)}


def num_weights(model: ModelConfig) -> int:
    """Weights of all products: of all layers, with all their experts, and the head's."""
    return _num_weights(model, 0 if model.experts is None else model.experts.num_experts)


def num_active_weights(model: ModelConfig) -> int:
    """Those of them that one token goes through, and that a step of one sequence reads."""
    return _num_weights(model, 0 if model.experts is None else model.experts.num_used)


def _num_weights(model: ModelConfig, num_experts: int) -> int:
    heads = 2 * model.num_attention_heads + 2 * model.num_kv_heads
    total = model.vocab_size + model.num_layers * model.head_dim * heads
    for layer in model.layers:
        if layer.has_experts and model.experts is not None:
            total += model.experts.num_experts + 3 * num_experts * model.experts.size
        else:
            total += 3 * model.intermediate_size
    return total * model.hidden_size


def kept_as(kv_cache_dtype: KVCacheDtype, dtype: str) -> str:
    """How keys and values are kept, one of KV_BYTES. dtype: of what is computed with."""
    match kv_cache_dtype:
        case "auto" | "plain":
            return dtype
        case "fp8":
            return "fp8_e4m3"
    return kv_cache_dtype


def kv_bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """Bytes of one token's keys and values, all layers together, with their scales. kv_dtype: of KV_BYTES.

    Layers with a window keep all tokens too.
    """
    number_bytes, scale_bytes = KV_BYTES[kv_dtype]
    return 2 * model.num_layers * model.num_kv_heads * (model.head_dim * number_bytes + scale_bytes)


def default_kv_cache_memory_bytes(
    *,
    bytes_per_token: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    free_bytes: int,
    fraction: float,
    step_bytes: int = 0,
) -> int:
    """A fraction of the free memory, and no more than the sequences of a full batch can fill.

    step_bytes: that the largest step needs of the free memory, too; they are left to it.
    """
    usable = usable_cache_bytes(bytes_per_token, max_num_seqs, max_model_len, block_size)
    return max(0, min(usable, int(free_bytes * fraction), free_bytes - step_bytes))


def usable_cache_bytes(bytes_per_token: int, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """What the sequences of a full batch can fill, and the null block."""
    return (max_num_seqs * -(-max_model_len // block_size) + 1) * block_size * bytes_per_token


def staged_blocks(block_bytes: int) -> int:
    """Blocks of a half. block_bytes: of all layers together."""
    return max(1, min(MOST_STAGED_BLOCKS, MOST_STAGED_BYTES // block_bytes))


def staging_bytes(block_bytes: int) -> int:
    """Of both halves."""
    return NUM_HALVES * staged_blocks(block_bytes) * block_bytes


def check_free(kv_cache_memory_bytes: int, free_bytes: int) -> None:
    """ConfigError for more than there is. A CPU's cache is taken as it fills: too late to find that out."""
    if kv_cache_memory_bytes > free_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={kv_cache_memory_bytes!r} is more than the {free_bytes} bytes that are "
            "free beside the weights; lower --kv-cache-memory-bytes, or leave it out to have it chosen"
        )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory once the weights are loaded, in bytes.

    total, free: as the driver says. weights: what loading took. step: what the largest step takes.
    graphs: set aside for recorded decode steps. adapters: the same for LoRA adapters. staging: the same for
    blocks on their way to main memory and back.
    """

    total: int
    free: int
    weights: int
    step: int
    graphs: int
    adapters: int = 0
    staging: int = 0

    @property
    def spare(self) -> int:
        return int(self.total * SPARE_SHARE)

    @property
    def for_cache(self) -> int:
        """What is left for the KV cache; negative if it does not even suffice for the rest."""
        return self.free - self.step - self.graphs - self.adapters - self.staging - self.spare

    def cache_bytes(
        self, wanted: int | None, *, usable: int, least: int, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """What the KV cache gets. ConfigError, with all of the arithmetic, if there is too little.

        wanted: what the user asks for. usable: what sequences of a full batch can fill. least: what one of
        max_model_len needs.
        """
        needed = least if wanted is None else wanted
        if needed <= self.for_cache:
            return min(usable, self.for_cache) if wanted is None else wanted
        whose = (
            f"one sequence of max_model_len={max_model_len}"
            if wanted is None
            else f"kv_cache_memory_bytes={wanted!r}"
        )
        remedies = [
            "--max-model-len" if wanted is None else "--kv-cache-memory-bytes",
            f"--max-num-batched-tokens (now {max_num_batched_tokens})",
            "--max-num-seqs",
        ]
        if self.graphs:
            remedies.append("--cuda-graph-sizes")
        if self.adapters:
            remedies.append("--max-cpu-loras")
        offload = f"{_gib(self.staging)} KV offload on its way - " if self.staging else ""
        others = max(0, self.total - self.free - self.weights)
        raise ConfigError(
            f"the KV cache does not fit: it needs {_gib(needed)} for {whose}, and has "
            f"{_gib(self.for_cache)} = {_gib(self.total)} of this GPU - {_gib(self.weights)} weights - "
            f"{_gib(others)} taken by others and the driver - {_gib(self.step)} the largest step, as "
            f"measured - {_gib(self.graphs)} recorded decode steps - {_gib(self.adapters)} LoRA adapters - "
            f"{offload}{_gib(self.spare)} spare ({SPARE_SHARE:.0%}); lower {', '.join(remedies)}, or take a "
            "quantization of fewer bits"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def least_cache_bytes(bytes_per_token: int, max_model_len: int, block_size: int) -> int:
    """Of one sequence, and of the null block."""
    return (-(-max_model_len // block_size) + 1) * block_size * bytes_per_token


def num_kv_blocks(
    *, kv_cache_memory_bytes: int, bytes_per_token: int, max_model_len: int, block_size: int
) -> int:
    """Blocks besides the null block, which takes memory too. ConfigError if a sequence cannot fit."""
    bytes_per_block = block_size * bytes_per_token
    num_blocks = kv_cache_memory_bytes // bytes_per_block - 1
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"kv_cache_memory_bytes={kv_cache_memory_bytes!r} holds {max(0, num_blocks) * block_size} "
            f"tokens, less than max_model_len={max_model_len!r}; raise --kv-cache-memory-bytes to at least "
            f"{(needed + 1) * bytes_per_block}, or lower --max-model-len"
        )
    return num_blocks


def free_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Main memory that this process may still take: what the machine has, cut down to the cgroup's limit.

    ConfigError on a machine that tells neither its free memory nor all of it.
    """
    free = _meminfo_available(meminfo)
    if free is None:
        free = int(_physical_memory() * FREE_FRACTION)
    room = _cgroup_room(cgroup_root)
    return free if room is None else max(0, min(free, room))


def _meminfo_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"kv_cache_memory_bytes=None: this machine does not say how much memory it has ({error}); "
            "give --kv-cache-memory-bytes"
        ) from error


def _cgroup_room(root: Path) -> int | None:
    """Limit less use of this container's cgroup (version 2, else 1); None without a limit."""
    for limit_file, use_file in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = limit_file.read_text(encoding="ascii").strip(), use_file.read_text(encoding="ascii")
        except OSError:
            continue
        if limit == "max":
            return None
        # File pages count as used but are given back on demand.
        return int(limit) - int(used) + _inactive_file_bytes(limit_file.parent / "memory.stat")
    return None


def _inactive_file_bytes(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    totals = dict(line.split() for line in lines)
    return int(totals.get("total_inactive_file", totals.get("inactive_file", "0")))
