"""An engine that cannot hold its model says so before it reads any weights."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway_runtime import cleared_memory, kv_budget, runner, start_memory
from headway_runtime.config import Envelope, Limits, OffloadConfig, SpeculativeConfig
from headway_runtime.errors import ConfigError, DoesNotFitError
from headway_runtime.fit.admission import refuse_what_cannot_fit
from headway_runtime.kernels.triton import launch
from headway_runtime.model_config import read_model_config
from headway_runtime.parallel.ranks import OnlyRank
from headway_runtime.quantization.choice import choose_quantization

GIB = 2**30


@pytest.fixture
def admit(fixture_folder: Any, engine_config: Any) -> Any:
    """admit(free bytes, num_multiprocessors, **changes of the config): for Llama 3.1 8B in bfloat16, on a GPU
    with Triton's kernels unless told otherwise."""
    folder = fixture_folder("llama-3.1-8b")

    def run(free_bytes: int, num_multiprocessors: int = 132, **changes: Any) -> None:
        # What a CPU compresses depends on which one it is.
        plain: dict[str, Any] = {"device": "cuda", "weight_compression": "none"}
        fields = {**plain, "kv_cache_memory_bytes": None, "max_model_len": 8192} | changes
        config = engine_config(folder, **fields)
        quantization = choose_quantization(config.quantization, folder)
        refuse_what_cannot_fit(
            config,
            read_model_config(folder),
            quantization,
            "bfloat16",
            free_bytes,
            num_multiprocessors=num_multiprocessors,
        )

    return run


def test_weights_that_do_not_fit_are_refused_with_the_arithmetic_and_the_nearest_that_fits(
    admit: Any,
) -> None:
    with pytest.raises(ConfigError) as caught:
        admit(12 * GIB)
    told = str(caught.value)
    assert "weights 14.96 GiB (bfloat16, quantization none)" in told
    assert "one sequence of 8192 tokens x 131072 B (bfloat16), 1.00 GiB + the largest step" in told
    assert "1024 tokens, 198.80 MiB = 16.16 GiB" in told
    assert "12.00 GiB of memory are free on device 'cuda'" in told
    assert "nearest that fits: --quantization fp8 (weights 7.98 GiB + KV cache 1.00 GiB)" in told
    assert "\n" not in told
    admit(12 * GIB, quantization="fp8")


def test_a_change_that_needs_more_than_the_usual_share_says_so(admit: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"--quantization fp8 --kv-cache-dtype fp8 --kv-cache-mem\S+ 8\d+ "
    ) as caught:
        admit(19 * GIB, device="cpu", max_model_len=131072)
    found = re.search(r"--kv-cache-memory-bytes (\d+)", str(caught.value))
    assert found is not None
    coded = {"quantization": "fp8", "kv_cache_dtype": "fp8", "kv_cache_memory_bytes": int(found[1])}
    admit(19 * GIB, device="cpu", max_model_len=131072, **coded)


def test_what_fits_is_let_in_and_what_the_sum_may_be_wrong_by_is_left_to_the_load(admit: Any) -> None:
    admit(17 * GIB)
    admit(16 * GIB)


def test_a_context_too_long_for_what_is_left_is_refused_with_the_longest_that_fits(admit: Any) -> None:
    with pytest.raises(ConfigError, match="--max-model-len") as caught:
        admit(22 * GIB, max_model_len=131072, kv_cache_dtype="fp8")
    found = re.search(r"--max-model-len (\d+) --kv-cache-memory-bytes (\d+)", str(caught.value))
    assert found is not None
    # 22 GiB less weights of 14.96, rotary tables of 0.05 and a step of 0.195, at 66 KiB a token.
    assert 107_500 < int(found[1]) < 108_500
    changed = {"max_model_len": int(found[1]), "kv_cache_memory_bytes": int(found[2])}
    admit(22 * GIB, kv_cache_dtype="fp8", **changed)


def test_only_where_pytorch_attends_a_gathered_context_counts(admit: Any) -> None:
    """100,000 tokens of one layer's 8-bit keys and values, as numbers and on their way to be: 2.1 GiB."""
    length = {"max_model_len": 100_000, "kv_cache_dtype": "fp8"}
    admit(22 * GIB, **length)
    with pytest.raises(DoesNotFitError, match=r"the largest step, 1024 tokens, 2\.\d+ GiB"):
        admit(22 * GIB, num_multiprocessors=0, **length)


@pytest.mark.parametrize("uses_triton", [True, False])
def test_what_decides_on_kernels_decides_on_the_arithmetic_of_the_start(
    uses_triton: bool,  # noqa: FBT001 - a row of a table
    fixture_folder: Any,
    engine_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    folder = fixture_folder("llama-3.1-8b")

    def note(*_: Any, num_multiprocessors: int) -> None:
        seen.append(num_multiprocessors)
        raise ConfigError("enough")

    monkeypatch.setattr(start_memory, "refuse_what_cannot_fit", note)
    monkeypatch.setattr(start_memory, "uses_triton", lambda _: uses_triton)
    monkeypatch.setattr(start_memory, "free_bytes_for", lambda *_: 22 * GIB)
    monkeypatch.setattr(launch, "gpu_of", lambda _: launch.Gpu("a", 90, 132))
    memory = start_memory.StartMemory(
        engine_config(folder), read_model_config(folder), torch.device("cuda"), OnlyRank()
    )
    with pytest.raises(ConfigError, match="enough"):
        memory.refuse_what_cannot_fit(choose_quantization("auto", folder), "bfloat16")
    assert seen == [132 if uses_triton else 0]


def test_a_cpus_share_for_the_kv_cache_is_told_with_the_flag_that_changes_it(admit: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"gets 40%, .* less than .*nearest that fits: --kv-cache-memory-bytes"
    ) as caught:
        admit(22 * GIB, device="cpu", max_model_len=32768, num_threads=2)
    found = re.search(r"--kv-cache-memory-bytes (\d+)", str(caught.value))
    assert found is not None
    admit(22 * GIB, device="cpu", max_model_len=32768, kv_cache_memory_bytes=int(found[1]))


def test_a_step_too_large_beside_the_weights_is_refused_with_the_largest_that_fits(admit: Any) -> None:
    large = {"envelope": Envelope(64, 16384), "limits": Limits(64, 16384), "max_model_len": 16384}
    with pytest.raises(
        ConfigError, match=r"largest step, 16384 tokens, .*nearest that fits: --max-num-batched-tokens"
    ) as caught:
        admit(int(17.8 * GIB), **large)
    found = re.search(r"--max-num-batched-tokens (\d+)", str(caught.value))
    assert found is not None
    smaller = {"envelope": Envelope(64, int(found[1])), "limits": Limits(64, int(found[1]))}
    admit(int(17.8 * GIB), **large | smaller)
    with pytest.raises(ConfigError, match=r"largest step, 16384 tokens"):
        admit(int(17.8 * GIB), **large, kv_cache_memory_bytes=3 * GIB)


def test_a_cache_too_small_for_one_sequence_is_refused_at_once(admit: Any) -> None:
    with pytest.raises(ConfigError, match="less than max_model_len=8192; raise --kv-cache-memory-bytes"):
        admit(80 * GIB, kv_cache_memory_bytes=2**20)


def test_a_cache_too_large_beside_the_weights_is_refused_at_once(admit: Any) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes={20 * GIB} is more than the"):
        admit(24 * GIB, kv_cache_memory_bytes=20 * GIB)


def test_a_draft_counts(admit: Any, fixture_folder: Any) -> None:
    admit(17 * GIB)
    draft = SpeculativeConfig("draft_model", str(fixture_folder("llama-3.2-1b")))
    with pytest.raises(ConfigError, match=r"weights 17.27 GiB"):
        admit(17 * GIB, speculative=draft)


def test_what_offloaded_blocks_pass_through_counts(admit: Any) -> None:
    """95% of weights of 14.96 GiB and of a step of 0.19, a cache of 1, and twice 64 blocks of 2 MiB."""
    given = {"kv_cache_memory_bytes": GIB + 2**22}
    offload = given | {"offload": OffloadConfig(8 * GIB)}
    admit(int(15.5 * GIB), **given)
    admit(int(15.75 * GIB), **offload)
    with pytest.raises(ConfigError, match=r"\+ KV offload on its way 256.00 MiB \(--kv-offloading-size\)"):
        admit(int(15.5 * GIB), **offload)


def test_a_check_that_only_warns_lets_it_try(admit: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DoesNotFitError, match="the model does not fit"):
        admit(12 * GIB)
    assert not caplog.records
    admit(12 * GIB, memory_check="warn")
    assert "the model does not fit: weights 14.96 GiB" in caplog.text
    assert "nearest that fits: --quantization fp8" in caplog.text


def test_an_engine_is_refused_before_it_opens_its_weights(
    fixture_folder: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are none: opening them would be another error."""
    monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: 4 * GIB)
    folder = fixture_folder("llama-3.1-8b")
    config = engine_config(folder, kv_cache_memory_bytes=None, weight_compression="none")
    with pytest.raises(ConfigError, match=r"the model does not fit: weights 14.9\d GiB"):
        runner.Runner(config)


def test_memory_that_was_cleared_for_weights_counts_as_free(
    fixture_folder: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(cleared_memory, "num_cleared", lambda: GIB)

    def note(*arguments: Any, **_: Any) -> None:
        seen.append(arguments[-1])
        raise ConfigError("enough")

    monkeypatch.setattr(start_memory, "refuse_what_cannot_fit", note)
    with pytest.raises(ConfigError, match="enough"):
        runner.Runner(replace(engine_config(fixture_folder("llama-3.1-8b")), num_threads=1))
    assert seen == [5 * GIB]
