"""A start has its kernels compiled by other processes, waits for them, and does without them if it must."""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway_runtime.compiling import ahead, order
from headway_runtime.compiling.ahead import KernelsAhead, kernels_ahead
from headway_runtime.compiling.order import CompileOrder
from headway_runtime.config import EngineConfig
from headway_runtime.kernels.triton import overlap
from headway_runtime.kernels.triton.launch import Gpu, imagine
from headway_runtime.parallel.ranks import OnlyRank
from headway_runtime.parallel.share import Share
from headway_runtime.start_timeline import StartTimeline

H200 = Gpu("nvidia_h200", 90, 132)
# The second of two ranks chooses no tokens, so it has few kernels.
SECOND = Share(1, 2)
Engine = Callable[..., EngineConfig]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def order_of(config: EngineConfig) -> CompileOrder:
    return CompileOrder(config, H200, SECOND, 2, os.getpid())


def test_kernels_are_compiled_while_others_work_and_once(
    engine_of: Engine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    imagine(H200)
    config, timeline = engine_of(enforce_eager=True), StartTimeline()
    caplog.set_level(logging.INFO)
    begun = ahead._begin(config, torch.device("meta"), SECOND)
    assert begun is not None
    begun.wait(timeline)

    compiled = {path.stem for path in cache.rglob("*.cubin")}
    assert {"norm_kernel", "paged_prefill_kernel", "paged_decode_kernel"} <= compiled
    assert "kernels are compiled" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert timeline.seconds["compile"] > 0

    # Wherever the model lies, and however many threads there are.
    moved = shutil.copytree(config.model_path, cache.parent / "elsewhere")
    again = engine_of(enforce_eager=True, model_path=str(moved), num_threads=7)
    assert ahead._begin(again, torch.device("meta"), SECOND) is None
    # But not for other shapes, or another GPU.
    assert not order_of(engine_of(enforce_eager=True, max_model_len=128)).is_done
    assert not CompileOrder(again, Gpu("other", 80, 108), SECOND, 2, os.getpid()).is_done
    shutil.rmtree(cache)
    assert not order_of(again).is_done


def test_another_engine_compiles_its_own_kernels(
    engine_of: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its files is another one: what a start launches hangs on more than kernels."""
    own = order_of(engine_of())
    engine = shutil.copytree(order.ENGINE_FOLDER, tmp_path / "engine")
    monkeypatch.setattr(order, "ENGINE_FOLDER", engine)
    own.done()
    assert own.is_done

    with (engine / "compiling" / "step_shapes.py").open("a", encoding="utf-8") as file:
        file.write("# Changed.\n")

    assert not own.is_done


def test_what_cannot_be_compiled_costs_a_warning(engine_of: Engine, caplog: pytest.LogCaptureFixture) -> None:
    order, timeline = order_of(engine_of(model_path="/nowhere")), StartTimeline()
    begun = KernelsAhead(order)
    begun.wait(timeline)

    assert "kernels are compiled when they are first launched" in caplog.text
    assert "/nowhere" in caplog.text
    assert "compile" in timeline.seconds
    assert not order.is_done


def test_a_start_does_not_wait_for_ever(engine_of: Engine, caplog: pytest.LogCaptureFixture) -> None:
    begun = KernelsAhead(order_of(engine_of()))
    begun.wait(StartTimeline(), seconds=0.0)

    assert "not done after 0 s" in caplog.text
    assert begun._process.poll() is not None


def test_a_start_that_fails_leaves_no_process(engine_of: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = KernelsAhead(order_of(engine_of()))
    monkeypatch.setattr(ahead, "_begin", lambda *_: begun)
    monkeypatch.setattr(ahead, "uses_triton", lambda _: True)
    with contextlib.suppress(KeyError), kernels_ahead(engine_of(), torch.device("cuda"), OnlyRank()) as got:
        assert got is begun
        raise KeyError

    assert begun._process.poll() is not None


def test_a_cpu_has_nothing_compiled(engine_of: Engine) -> None:
    with kernels_ahead(engine_of(device="cpu"), torch.device("cpu"), OnlyRank()) as begun:
        assert begun is None


def test_launches_that_overlap_are_of_kernels_of_their_own(
    engine_of: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_of()
    monkeypatch.setattr(overlap, "ENABLED", False)
    order_of(config).done()
    assert order_of(config).is_done

    monkeypatch.setattr(overlap, "ENABLED", True)

    assert not order_of(config).is_done
