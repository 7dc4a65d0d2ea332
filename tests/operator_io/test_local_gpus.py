"""What a service of one machine gets for the GPUs that its processes see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_operator import local_service
from headway_operator.local_service import LocalService
from headway_operator.spec import parse
from headway_operator.spec.batching import CPU_NUM_SEQS, GPU_NUM_SEQS


@pytest.fixture
def add_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """There is no GPU before it is called, and nothing hides GPUs."""
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidiactl").touch()
    monkeypatch.setattr(local_service, "DEVICES", devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return (devices / "nvidia0").touch


async def most_sequences(folder: Path, **spec: Any) -> int:
    """As the passes over a service with this spec see it."""
    file = folder / "service.yaml"
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {"model": {"source": "bundled://headway-tiny"}, "replicas": 1, **spec},
    }
    file.write_text(yaml.safe_dump(manifest))
    service = LocalService(file, 0, 1.0, lambda: None)
    found = parse(await service.fetch(service.key))
    assert found.spec.device == spec.get("device", "auto")
    return found.spec.highest_limits[0]


async def test_processes_that_see_gpus_take_as_many_sequences_as_pods_that_ask_for_one(
    add_gpu: Callable[[], None], tmp_path: Path
) -> None:
    assert await most_sequences(tmp_path) == CPU_NUM_SEQS
    add_gpu()
    assert await most_sequences(tmp_path) == GPU_NUM_SEQS
    assert await most_sequences(tmp_path, device="cpu") == CPU_NUM_SEQS
    assert await most_sequences(tmp_path, gpu={"count": 2}) == GPU_NUM_SEQS
    # Both `gpu` and the resource would be refused.
    assert await most_sequences(tmp_path, resources={"limits": {"nvidia.com/gpu": 1}}) == GPU_NUM_SEQS
    assert await most_sequences(tmp_path, batching={"maxNumSeqs": {"max": 8}}) == 8


@pytest.mark.parametrize(
    ("visible", "wanted"), [("", CPU_NUM_SEQS), ("-1", CPU_NUM_SEQS), ("1", GPU_NUM_SEQS)]
)
async def test_gpus_may_be_hidden_from_them(
    add_gpu: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    wanted: int,
) -> None:
    add_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert await most_sequences(tmp_path) == wanted
    template: dict[str, Any] = {
        "spec": {
            "containers": [
                {"name": "runtime", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]},
                {"name": "other", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": ""}]},
            ]
        }
    }
    assert await most_sequences(tmp_path, template=template) == GPU_NUM_SEQS
    template["spec"]["containers"][0]["env"][0]["value"] = ""
    assert await most_sequences(tmp_path, template=template) == CPU_NUM_SEQS
