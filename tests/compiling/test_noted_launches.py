"""What a start launches is noted without a GPU, and compiled into files that Triton then finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from headway_runtime.compiling.imagined_steps import launch_steps
from headway_runtime.compiling.noted_launches import (
    NotedLaunch,
    OfflineDriver,
    compile_launch,
    noted_launches,
    target_of,
)
from headway_runtime.config import EngineConfig, SpeculativeConfig
from headway_runtime.kernels.triton.launch import Gpu
from headway_runtime.kernels.triton.place_step import place_step_kernel
from headway_runtime.parallel.share import Share

H200 = Gpu("nvidia_h200", 90, 132)
Engine = Callable[..., EngineConfig]

EVERY_LAYERS = {"norm_kernel", "rotate_and_store_kernel", "paged_prefill_kernel", "paged_decode_kernel"}
EXPERTS = {"expert_choice_kernel", "expert_order_kernel", "expert_product_kernel", "expert_sum_kernel"}
SAMPLERS = {"block_kernel", "draw_kernel", "edit_kernel", "logprob_kernel"}


def names(launches: list[NotedLaunch]) -> set[str]:
    return {one.name for one in launches}


@pytest.mark.parametrize(
    ("model", "changes", "want"),
    [
        pytest.param("dense", {}, {"gated_product_kernel"}, id="bfloat16"),
        pytest.param("dense", {"kv_cache_dtype": "fp8"}, {"gated_product_kernel"}, id="KV in fp8"),
        pytest.param("dense", {"quantization": "fp8"}, {"coded_product_kernel"}, id="fp8"),
        pytest.param("dense", {"quantization": "int4"}, {"coded_product_kernel"}, id="int4"),
        pytest.param(
            "experts",
            {},
            EXPERTS,
            id="experts",
        ),
        pytest.param("windows", {"kv_cache_dtype": "int8"}, {"gated_product_kernel"}, id="windows"),
    ],
)
def test_all_that_a_start_launches_is_noted(
    model: str, changes: dict[str, Any], want: set[str], engine_of: Engine
) -> None:
    launches = noted_launches(H200, lambda: launch_steps(engine_of(model, **changes), Share()))

    assert EVERY_LAYERS | SAMPLERS | {"place_step_kernel"} <= names(launches)
    assert want <= names(launches)


def test_without_recordings_and_samples_there_are_less(engine_of: Engine) -> None:
    config = engine_of(enforce_eager=True)

    second = noted_launches(H200, lambda: launch_steps(config, Share(1, 2)))
    alone = noted_launches(H200, lambda: launch_steps(config, Share()))

    assert names(second) >= EVERY_LAYERS
    assert not names(second) & (SAMPLERS | {"place_step_kernel"})
    assert names(alone) >= EVERY_LAYERS | SAMPLERS
    assert "place_step_kernel" not in names(alone)


def test_a_model_that_guesses_is_run_as_well(engine_of: Engine) -> None:
    draft = engine_of("windows").model_path
    config = engine_of(speculative=SpeculativeConfig("draft_model", draft), enforce_eager=True)

    def launched(of: EngineConfig) -> int:
        return len(noted_launches(H200, lambda: launch_steps(of, Share())))

    assert launched(config) > launched(engine_of(enforce_eager=True))


def placing(device: str, start: int) -> tuple[Any, ...]:
    """Arguments of a kernel, one of which begins where `start` says."""
    numbers, tokens = (torch.zeros(64, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    own = numbers[start : start + 8]
    return numbers[:1], numbers, own, own, own, tokens, tokens, numbers.view(8, 8), 8


CONSTANTS = {"BLOCK_SIZE": 16, "TILE": 128, "num_warps": 1, "overlaps": False}


@pytest.mark.parametrize("start", [0, 4, 5])
def test_memory_that_is_not_there_is_launched_on_as_if_it_were(start: int) -> None:
    """Whether 16 divides an address, too."""

    def noted(device: str) -> NotedLaunch:
        (launch,) = noted_launches(
            H200, lambda: place_step_kernel[(2,)](*placing(device, start), **CONSTANTS)
        )
        return launch

    got, want = noted("meta"), noted("cpu")

    assert (got.signature, got.constants, got.options) == (want.signature, want.constants, want.options)
    assert got.attributes == want.attributes
    assert sum(map(bool, got.attributes.values())) == (5 if start == 5 else 8)


def test_triton_finds_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits = []

    def listen(*, cache_hit: bool, **rest: Any) -> None:
        hits.append(cache_hit)

    (launch,) = noted_launches(H200, lambda: place_step_kernel[(2,)](*placing("meta", 0), **CONSTANTS))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    compile_launch(launch, target_of(H200))
    triton.runtime.driver.set_active(OfflineDriver(target_of(H200)))
    try:
        # As Triton does it for a launch.
        place_step_kernel.run(*placing("cpu", 0), grid=(2,), warmup=True, **CONSTANTS)
    finally:
        triton.runtime.driver.set_active(None)
        place_step_kernel.device_caches.clear()

    assert hits == [False, True]
    assert list(tmp_path.rglob("place_step_kernel.cubin"))
