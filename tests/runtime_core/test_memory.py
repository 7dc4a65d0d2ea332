"""How large the KV cache becomes."""

from pathlib import Path
from typing import Any

import pytest

from headway_runtime.config import Envelope, Limits
from headway_runtime.errors import ConfigError
from headway_runtime.memory import (
    default_kv_cache_memory_bytes,
    free_memory_bytes,
    kv_bytes_per_token,
    num_active_weights,
    num_kv_blocks,
    num_weights,
)
from headway_runtime.model_config import read_model_config

SIZES: dict[str, int] = {"bytes_per_token": 100, "max_model_len": 100, "block_size": 16}


def test_bytes_per_token_count_keys_and_values_of_all_layers(write_config: Any) -> None:
    config = read_model_config(write_config())
    assert kv_bytes_per_token(config, "float32") == 2 * 2 * 2 * 8 * 4
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 2 * 2 * 8 * 2


def test_default_is_a_share_of_the_free_memory() -> None:
    got = default_kv_cache_memory_bytes(max_num_seqs=64, free_bytes=100_000, fraction=0.4, **SIZES)
    assert got == 40_000


def test_default_takes_no_more_than_a_full_batch_can_fill() -> None:
    got = default_kv_cache_memory_bytes(max_num_seqs=3, free_bytes=10**12, fraction=0.4, **SIZES)
    assert num_kv_blocks(kv_cache_memory_bytes=got, **SIZES) == 3 * 7


def test_default_leaves_the_largest_step_its_memory() -> None:
    got = default_kv_cache_memory_bytes(
        max_num_seqs=64, free_bytes=100_000, fraction=0.85, step_bytes=40_000, **SIZES
    )
    assert got == 60_000
    none = default_kv_cache_memory_bytes(
        max_num_seqs=64, free_bytes=10, fraction=0.85, step_bytes=40_000, **SIZES
    )
    assert none == 0


def test_cache_that_cannot_hold_one_sequence_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(ConfigError, match="raise --kv-cache-memory-bytes to at least 12800") as caught:
        num_kv_blocks(kv_cache_memory_bytes=12_799, **SIZES)
    assert "kv_cache_memory_bytes=12799 holds 96 tokens, less than max_model_len=100" in str(caught.value)
    assert num_kv_blocks(kv_cache_memory_bytes=12_800, **SIZES) == 7


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "want"),
    [
        pytest.param({}, 2048 * 1000, id="no cgroup"),
        pytest.param({"memory.max": "max\n", "memory.current": "5\n"}, 2048 * 1000, id="version 2, no limit"),
        pytest.param(
            {
                "memory.max": "900000\n",
                "memory.current": "500000\n",
                "memory.stat": "anon 1\ninactive_file 100000\n",
            },
            500_000,
            id="version 2",
        ),
        pytest.param(
            {"memory/memory.limit_in_bytes": "900000", "memory/memory.usage_in_bytes": "500000"},
            400_000,
            id="version 1",
        ),
        pytest.param(
            {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "500000"},
            2048 * 1000,
            id="version 1, no limit",
        ),
        pytest.param({"memory.max": "100", "memory.current": "5000"}, 0, id="over its limit"),
    ],
)
def test_free_memory_is_cut_down_to_the_cgroup(files: dict[str, str], want: int, tmp_path: Path) -> None:
    meminfo = write_files(tmp_path, {"meminfo": "MemTotal: 9 kB\nMemAvailable:    2000 kB\n"}) / "meminfo"
    root = write_files(tmp_path / "cgroup", files)
    assert free_memory_bytes(meminfo, root) == want


def test_machine_that_does_not_tell_its_free_memory_offers_half_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert free_memory_bytes(tmp_path / "meminfo", tmp_path) == 2_048_000


def test_machine_that_tells_nothing_of_its_memory_needs_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)
    with pytest.raises(ConfigError, match="give --kv-cache-memory-bytes"):
        free_memory_bytes(tmp_path / "meminfo", tmp_path)


def test_engine_chooses_a_cache_for_a_full_batch_of_a_small_model(start_engine: Any) -> None:
    driver = start_engine(kv_cache_memory_bytes=None, envelope=Envelope(4, 64), limits=Limits(4, 64))
    assert driver.engine.num_kv_tokens == 4 * 256
    assert driver.engine.kv_blocks_total == 64


def test_engine_refuses_a_cache_too_small_for_one_sequence(start_engine: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=10000 holds"):
        start_engine(kv_cache_memory_bytes=10_000)


def test_engine_refuses_more_positions_than_the_model_has(start_engine: Any) -> None:
    with pytest.raises(
        ConfigError, match="max_model_len=513 is more than the model's max_position_embeddings, 512"
    ):
        start_engine(max_model_len=513)


def test_a_cache_larger_than_what_is_free_is_refused_at_the_start(start_engine: Any) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_memory_bytes={2**50} is more than the \d+ bytes"):
        start_engine(kv_cache_memory_bytes=2**50)


def test_weights_of_a_dense_model_are_all_active(write_config: Any) -> None:
    config = read_model_config(write_config(head_dim=16))
    per_layer = 32 * 16 * (4 + 2 + 2 + 4) + 3 * 32 * 48
    assert num_weights(config) == num_active_weights(config) == 2 * per_layer + 64 * 32


def test_experts_are_counted_all_or_as_many_as_a_token_uses(write_config: Any) -> None:
    fields = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    folder = write_config(architectures=["Qwen3MoeForCausalLM"], head_dim=8, **fields)
    config = read_model_config(folder)
    rest = 2 * 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48 + 16 * 32 + 64 * 32
    assert num_weights(config) == rest + 16 * 3 * 32 * 8
    assert num_active_weights(config) == rest + 3 * 3 * 32 * 8


def test_layers_with_a_window_keep_the_kv_of_all_tokens(write_config: Any) -> None:
    folder = write_config(architectures=["MistralForCausalLM"], sliding_window=16)
    assert kv_bytes_per_token(read_model_config(folder), "float32") == 2 * 2 * 2 * 8 * 4
